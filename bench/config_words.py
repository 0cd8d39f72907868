"""Configs in the few words of a table."""

_WORDS = {"num_comm_sms": "push by {}", "chunk_tiles": "chunks of {}", "item_tiles": "items of {}"}


def config_in_short(config):
    """A config in the few words that tell it from others."""
    if config is None:
        return ""
    if config.get("method") == "torch":
        return "the sequence"
    words = []
    if tiles := config.get("tiles"):
        words.append(f"{tiles['block_m']}x{tiles['block_n']}x{tiles['block_k']}, {tiles['num_stages']} stages")
    copies = config.get("transport") == "copy_engine"
    for name, value in config.items():
        if name in ("method", "tiles", "transport") or value is None or (copies and name == "num_comm_sms"):
            continue
        words.append(_WORDS.get(name, f"{name.replace('_', ' ')} {{}}").format(value))
    if copies:
        words.insert(1, "copy engine")
    return ", ".join(words)
