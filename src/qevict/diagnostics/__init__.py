"""How attention moves while a model decodes, and what a policy loses to it (section 3, appendices I and K).

`reference` runs full KV once and keeps its attention (`trace`). `recording` forces real caches (`conditions`) on the
same tokens and keeps what each held (`policy`). `mass`, `agreement` and `residency` are the metrics, pure functions;
`summary` applies them to an article, `tables`, `pictures` and `page` show them over all articles.
"""
