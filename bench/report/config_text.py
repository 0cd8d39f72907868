"""Short text for configs in tables."""

from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS

_FORMATS = {
    "num_comm_sms": "{} comm SMs", "chunk_tiles": "chunks of {} tiles", "item_tiles": "groups of {} tiles",
    "warp_specialize": "warp-specialized",
}

# {transport: fields that it does not use}
_UNUSED = {
    "copy_engine": ("num_comm_sms",),
    "direct": ("item_tiles",),
    "one_shot": ("exchange", "chunk_tiles", "item_tiles"),
}


def config_in_short(config):
    """Return a short text for a config: the fields that distinguish it from others."""
    if config is None:
        return ""
    if config.get("method") == "torch":
        return "torch"
    if config.get("method") == "parts":
        return "pipelined" if config["pieces"] == 1 else f"pipelined, {config['pieces']} pieces"
    fields = [f"pipelined {config['method']}"] if config.get("method") in KERNELS else []
    if tiles := config.get("tiles"):
        fields.append(f"{tiles['block_m']}x{tiles['block_n']}x{tiles['block_k']}, {tiles['num_stages']} stages")
    transport = _transport(config)
    for name, value in _own_fields(config, transport).items():
        fields.append(_FORMATS.get(name, f"{name.replace('_', ' ')} {{}}").format(value))
    if transport in _UNUSED:
        fields.insert(1, transport.replace("_", "-" if transport == "one_shot" else " "))
    return ", ".join(fields)


def used_fields(config):
    """Return the fields of a config on which its kernels depend. Two configs with equal ones run the same."""
    if config.get("method") == "parts":
        return {"method": "parts", "pieces": config.get("pieces", 1)}
    transport = _transport(config)
    return {
        "method": config.get("method"), "transport": transport, "tiles": config.get("tiles"),
        **_own_fields(config, transport),
    }


def transport_in_short(config):
    """Return how a config sends data."""
    return "pipelined" if config["method"] == "parts" else config["transport"].replace("_", " ")


def _transport(config):
    return "one_shot" if "one_shot" in config.values() else config.get("transport")


def _own_fields(config, transport):
    """Return the fields other than method, tiles and transport that the transport uses, without neutral values."""
    skipped = {"method", "tiles", "transport", *_UNUSED.get(transport, ())}
    neutral = {"split_k": 1, "pieces": 1}
    return {
        name: value for name, value in config.items()
        if name not in skipped and value is not None and value is not False and value != neutral.get(name)
    }
