"""Names and bytes of a DSPARK drafter's nodes, for the node tables of its draft and extend graphs."""

from __future__ import annotations

from node_table import BF16, FP32, NOTHING, Extra

from sgling.srt.config.dspark_config import DSparkConfig

TILE = 16  # output rows of a product per block


def drafter_nodes(drafter: DSparkConfig | None, graph: str, context: int) -> Extra:
    """Nodes of the ``draft`` or ``extend`` graph of a drafter with grouped-query attention; no drafter, no names.

    Products of equal grids share a line: a layer's queries, keys and values with its FFN's first product.
    """
    if drafter is None or graph not in ("draft", "extend"):
        return NOTHING
    hidden, shape = drafter.hidden_size, drafter.attention
    row, layers = drafter.kv_row_dim, drafter.num_hidden_layers
    features = len(drafter.target_layer_ids) * hidden
    if graph == "extend":
        products = {"dspark.fc": (hidden, features), "dspark.kv": (layers * row, hidden)}
    else:
        queries = shape.heads * shape.head_dim
        products = {"dspark.qkv": (queries + row, hidden), "dspark.o_proj": (hidden, queries)}
        up = (2 * drafter.intermediate_size, hidden)
        name = "dspark.qkv, ffn.up" if up == products["dspark.qkv"] else "ffn.up"
        products = {**{key: value for key, value in products.items() if key not in name}, name: up}
    sizes = {name: outputs * inputs * BF16 for name, (outputs, inputs) in products.items()}
    sizes["block_split_kernel"] = context * row * BF16
    w2 = drafter.vocab_size * drafter.markov_rank * BF16
    sizes["markov_pick_kernel"] = w2 + drafter.vocab_size * FP32
    sizes["markov_kernel"] = w2 + drafter.block_size * drafter.vocab_size * FP32
    return Extra({-(-outputs // TILE): name for name, (outputs, _) in products.items()}, sizes)
