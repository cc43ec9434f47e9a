"""Names what is wrong with a run, and checks whether a cluster has what a run needs."""
