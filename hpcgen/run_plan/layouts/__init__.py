"""The fastest layouts of a run on one or several numbers of nodes, and the number that a deadline or a budget chooses.

| part | module |
| --- | --- |
| what is found | `result` |
| the run on other numbers of nodes | `sizes` |
| a batch size that limits the layouts | `batch` |
| the search on each number of nodes, and the numbers that are tried | `find` |
| JSON data for scripts, and sentences for people | `summary` |
| a chosen layout in the run file | `choice` |

Only commands that show layouts import these modules, since `render` needs none of them.
"""
