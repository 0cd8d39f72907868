"""Tokens to the ranks of their experts and back: ep_dispatch, ep_combine, all_to_all."""
