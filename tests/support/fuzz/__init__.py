"""The fuzzer: `make fuzz MINUTES=n SEED=s`, or `PYTHONPATH=tests:benchmarks python -m support.fuzz --help`.

Sources of cases, each of which is a line of text that runs the case again. On simulated ranks (`simulated/`):

    programs:SEED                       a random program
    tiles:SEED                          a random head with losses, and MLPs, in tiles
    op_db:OP:VARIANT:SAMPLE             an op of torch's own op_db behind an attention

One kind of program each, on real ranks, under aot_eager or, a fixed share, under Inductor with default options (`kinds/`):

    singular:SEED, routing:SEED         row functions that are singular somewhere, and integers that are computed of tokens,
                                        in random programs (three of four on simulated ranks): `stepped`
    aliases:SEED, writes:SEED           results that share memory, trained; writes by eager code after the call: `memory`
    data_errors:SEED                    an error that the data makes, on one rank's rows or on all
    transforms:SEED                     torch.func inside a model
    after_failure:SEED                  a process that goes on after a failed compile
    faults:FAULT:SEED                   one of `fault_table` in a training loop (`faults`)

Cases have an order that is always the same for a session's seed, and `ledger` has what came of which. The oracle is the
unmodified model on one device: all results and gradients, and what else a play finds.
"""
