"""The page that shows the layouts of a run.

| part of the page | module |
| --- | --- |
| memory of each pipeline stage | `memory` |
| when each stage computes | `schedule` |
| which ranks are on which nodes, and what they exchange | `devices` |
| throughput, time and cost by number of nodes | `scaling` |
| the layouts in a table, and the parts of their steps | `views` |
| the complete page | `page` |
"""
