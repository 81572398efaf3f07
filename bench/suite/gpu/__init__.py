"""Parts of `bench/gpu`: TRL and Tandem on one GPU. Standard library only, like the suite's other parts, which they use."""
