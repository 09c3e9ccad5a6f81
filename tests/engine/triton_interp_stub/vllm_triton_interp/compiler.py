from triton.backends.compiler import BaseBackend


class InterpCPUBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interp-cpu"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
