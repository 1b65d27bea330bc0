"""Name the rank that others wait for: `call_watch` agrees on each call, `beacon` tells the others, `rank_status` says it."""
