"""A text that a page would obey if it took it for HTML."""

HOSTILE = """<script>document.title="owned"</script>"><img src=x onerror='document.title="owned"'>"""
