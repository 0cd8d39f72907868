"""All-to-all operators of expert parallelism: ep_dispatch, ep_combine and all_to_all."""
