"""Cases of each file of `pallas_kernels.ptx`, for tests/test_ptx.py."""
