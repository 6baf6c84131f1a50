"""The kernels that ship: a folder for each, with everything that knows it. `core.registry` lists them."""
