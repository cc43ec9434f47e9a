"""What a training run did, as one HTML file that needs nothing else: no network, no server, no other file.

The charts are SVG paths that this package writes, and a short script adds the values under the pointer. A plotting
library would bring 3 to 5 MB of script into every report (plotly), or pictures without values (matplotlib); and a
page that draws itself in the browser shows nothing in a mail, in print, or where scripts are off.
"""
