"""The search for the layout with which a run trains fastest, on machines that it may use.

| part of the search | module |
| --- | --- |
| what is found | `result` |
"""
