"""What `bench/run` is made of; the standard library only."""
