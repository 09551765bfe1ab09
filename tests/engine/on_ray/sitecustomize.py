"""In processes that Ray starts: `ray_on_cpu`, as soon as vLLM has its CPU platform.

And ranks on two hosts share no memory: vLLM's CPU build takes them for ranks on one host, because
it compares what Ray gives both the same. So each names its host, too, and its cluster, so that what
a killed engine has left in /dev/shm has another name than what the next one makes.

With runner V2 Triton's kernels are interpreted there, too, which is to be said before vLLM has
imported Triton; of its own modules, vLLM imports its version first.

The Ray executor of vLLM 0.19 asks each worker for its device, which one on the CPU has not, to make
it that of another thread, which the CPU does without.
"""

import os

if "TEST_RAY_ON_CPU" in os.environ:
    import socket

    import wrapt

    def _name_host(module):
        shared = module._CPUSHMDistributed
        named = shared.make_group_name
        place = f"{os.environ['RAY_ADDRESS'].rpartition(':')[2]}-{socket.gethostname()}"
        shared.make_group_name = staticmethod(lambda it: f"{named(it)}-{place}")

    def _set_no_device(module):
        wrapper = getattr(module, "RayWorkerWrapper", None)
        if hasattr(wrapper, "setup_device_if_necessary"):
            wrapper.setup_device_if_necessary = lambda _: None

    def _interpret(module):
        if "TEST_TRITON" in os.environ:
            import triton_on_cpu

            triton_on_cpu.install()

    wrapt.register_post_import_hook(_interpret, "vllm.version")
    wrapt.register_post_import_hook(_set_no_device, "vllm.v1.executor.ray_utils")
    wrapt.register_post_import_hook(
        lambda module: setattr(module.CpuPlatform, "ray_device_key", "GPU"), "vllm.platforms.cpu"
    )
    wrapt.register_post_import_hook(
        _name_host, "vllm.distributed.device_communicators.cpu_communicator"
    )
