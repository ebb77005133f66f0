"""What Pallas Mosaic GPU does not offer: a few instructions of PTX each, by subject.

`inline_mgpu` has no interpret mode, so every function here asks `interpreting()` and then does the
same with what Pallas has: its twin. tests/ptx holds both to one definition.

Register layouts are those of the wgmma accumulator (PTX ISA, "register fragments for
wgmma.mma_async.m64nNk16"): the 128 threads of a warpgroup hold a (64, n) tile as
`[column group of 8][row half][2 columns]`, thread t owning rows 16 * (t // 32) + (t % 32) // 4 and
8 more, columns 2 * (t % 4) and the next of each group.
"""
