"""The pages at `/`: what they show of a server's data, as HTML and as JSON. Knows no HTTP.

    data of store and hub -> pure functions here -> a dictionary -> a template, or the same dictionary as JSON

`tinsmith/server/routes/console.py` fetches the data and answers requests.
"""
