import os


def register():
    """vllm.general_plugins: runs in every vLLM process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import vllm.v1.sample.ops.topk_topp_sampler as m

    m.HAS_TRITON = False  # the Triton interpreter cannot run _topk_topp_kernel (python-int row_id); use the torch path
