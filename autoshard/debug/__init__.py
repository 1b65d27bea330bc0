"""Find out where numbers go wrong: check a plan, bisect its passes, replay a dump, simulate all ranks in one process."""
