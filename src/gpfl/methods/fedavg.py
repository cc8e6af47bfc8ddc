"""FedAvg."""

from dataclasses import dataclass

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """One model for all clients: the server averages the models that they train.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017. Clients start
    from the received weights w and are evaluated with them; n_i is the number of training samples of client i:

        L = CE(w)
        w ← Σ_i n_i w_i / Σ_i n_i

    No deviation from the paper.
    """

    name = "fedavg"
