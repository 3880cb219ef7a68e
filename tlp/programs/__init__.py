"""Targets, networks, workloads (subgraphs) and the programs of their design spaces.

    targets          this machine's TVM target, and checking one that was typed
    zoo, networks    torch networks → relax → tuning tasks
    workloads        a TIR module as a row of the store, and back
    space            design space of a workload: sample programs, replay sketch + decisions
    per_store        MetaSchedule's features of programs, kept on disk

Importing any of them but `zoo` imports neither torch nor tvm; calling them does.
"""
