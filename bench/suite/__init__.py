"""Parts of `bench/run`; the standard library only."""
