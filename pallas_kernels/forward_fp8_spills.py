"""Where the forward of operands in FP8 would spill registers, and does something else."""

from pallas_kernels.spills import Spill

# Addresses and entries of lists are made anew where they are used.
ADDRESSES: tuple[Spill, ...] = (Spill("fp8-H256-full-even", lambda plan: plan.problem.widest > 64),)
