"""The fuzzer: `make fuzz MINUTES=n SEED=s`, or `PYTHONPATH=tests:benchmarks python -m support.fuzz --help`.

Each source generates cases; the name of a case, a line of text, runs it again. On simulated ranks (`simulated/`):

    programs:SEED                       a random program
    tiles:SEED                          a random head with losses, and MLPs, in tiles
    op_db:OP:VARIANT:SAMPLE             an op of torch's own op_db after an attention

One kind of program each, on real ranks, under aot_eager or, a fixed share, under Inductor with default options (`kinds/`):

    singular:SEED, routing:SEED         row functions that are singular somewhere, and integers that are computed of tokens,
                                        in random programs (three of four on simulated ranks): `stepped`
    aliases:SEED, writes:SEED           results that share memory, trained; writes by eager code after the call: `memory`
    data_errors:SEED                    an error that the data makes, on one rank's rows or on all
    transforms:SEED                     torch.func inside a model
    after_failure:SEED                  a process that continues after a failed compilation
    faults:FAULT:SEED                   one of `fault_table` in a training loop (`faults`)

The order of cases is fixed for a session's seed, and `ledger` stores their outcomes. The oracle is the unmodified model
on a single device: all results and gradients, and the other values of a scene.
"""
