"""What tests share: interpret mode made complete, and compiling kernels without a GPU."""
