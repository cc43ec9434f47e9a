"""Report of a training run as one self-contained HTML file: no network, no server, no other file.

The charts are SVG paths written by this package, and a short script shows the values under the pointer. A plotting
library would add 3 to 5 MB of script to every report (plotly), or produce images without values (matplotlib). A page
that draws its charts in the browser shows nothing in an email, in print, or without scripts.
"""
