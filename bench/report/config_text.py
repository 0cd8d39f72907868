"""Configs in the few words of a table."""

from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS

_WORDS = {"num_comm_sms": "push by {}", "chunk_tiles": "chunks of {}", "item_tiles": "items of {}"}

# Fields that a way of transport makes no use of.
_IDLE = {"copy_engine": ("num_comm_sms",), "one_shot": ("exchange", "chunk_tiles", "item_tiles")}


def config_in_short(config):
    """A config in the few words that tell it from others."""
    if config is None:
        return ""
    if config.get("method") == "torch":
        return "the sequence"
    if config.get("method") == "parts":
        return "parts" if config["pieces"] == 1 else f"parts, in {config['pieces']} pieces"
    words = [f"{config['method']} by parts"] if config.get("method") in KERNELS else []
    if tiles := config.get("tiles"):
        words.append(f"{tiles['block_m']}x{tiles['block_n']}x{tiles['block_k']}, {tiles['num_stages']} stages")
    how = "one_shot" if "one_shot" in config.values() else config.get("transport")
    skipped = {"method", "tiles", "transport", *_IDLE.get(how, ())}
    for name, value in config.items():
        if name in skipped or value is None or (name in ("split_k", "pieces") and value == 1):
            continue
        words.append(_WORDS.get(name, f"{name.replace('_', ' ')} {{}}").format(value))
    if how in _IDLE:
        words.insert(1, how.replace("_", " "))
    return ", ".join(words)
