"""A run of several processes, for test_distributed: torchrun … distributed_run.py FOLDER METHOD[+RULE] [ROUND | resume]."""

import sys

import gpfl
from gpfl.engine.distributed import exit_process


class Stop(gpfl.Callback):
    """Exit after a round, as a kill would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_evaluate(self, record: dict[str, object]) -> None:
        if record["round"] == self.after:
            exit_process()


def main() -> None:
    folder, method, *stop = sys.argv[1:]
    if stop == ["resume"]:
        gpfl.resume(folder)
        exit_process()
    method, _, aggregation = method.partition("+")
    secure_sum = aggregation == "secure_sum"
    federation = gpfl.federate("digits", clients=5, classes_per_client=3, validation_fraction=0.1)
    callbacks = [Stop(int(stop[0]))] if stop else []
    gpfl.fit(
        method,
        federation,
        net="mlp",
        rounds=5,
        lr=0.05,
        client_fraction=0.6,
        metric="log_loss",
        aggregation="mean" if secure_sum or not aggregation else aggregation,
        secure_sum=secure_sum,
        engine="loop" if aggregation else "auto",  # neither depends on the order of uploads, nor does `loop` on other clients
        seed=1,
        checkpoint_every=2,
        out=folder,
        callbacks=callbacks,
    )
    exit_process()


if __name__ == "__main__":
    main()
