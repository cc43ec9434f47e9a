"""The fastest layouts of a run on one or several numbers of nodes, and the number that a deadline or a budget chooses.

| part | module |
| --- | --- |
| what is found | `result` |

Only commands that show layouts import these modules, since `render` needs none of them.
"""
