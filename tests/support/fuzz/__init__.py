"""The fuzzer: `make fuzz MINUTES=n`, or `PYTHONPATH=tests python -m support.fuzz --help`.

Four sources of cases, each of which is a line of text that runs the case again:

    programs:SEED                       a random program on simulated ranks (`programs`)
    tiles:SEED                          a random head with losses, and MLPs, in tiles (`tiled_programs`)
    op_db:OP:VARIANT:SAMPLE             an op of torch's own op_db behind an attention (`op_db`)
    faults:FAULT:SEED                   one of `fault_table` in a loop on real ranks (`faults`)

Cases have an order that is always the same, and `ledger` has what came of which. The oracle is the unmodified model on
one device (`oracle`): all results and gradients.
"""
