from triton.backends.driver import DriverBase


class InterpCPUDriver(DriverBase):
    """Marker only: lets vLLM see a "cpu" Triton backend; kernels run with TRITON_INTERPRET=1."""

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError
