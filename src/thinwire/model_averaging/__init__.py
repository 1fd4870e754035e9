"""Drop-in replacement for `torch.distributed.algorithms.model_averaging`: only the import prefix changes."""


def __dir__() -> list[str]:
    return ["averagers", "hierarchical_model_averager", "utils"]  # like torch's, it has no names but these
