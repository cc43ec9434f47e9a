"""The search for the layout with which a run trains fastest, on machines that it may use.

| part of the search | module |
| --- | --- |
| which layouts are tried | `space` |
| which are valid, fit and are fastest | `search` |
| what is found | `result` |
| why a layout is better than another | `reasons` |
| how a layout is called | `name` |
| faster layouts for warnings | `advice` |
| numbers of nodes, and the fewest that hold a model | `nodes`, `fewest_nodes` |
"""
