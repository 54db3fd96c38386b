"""Gets requests in, fast and safely: the client library, over either Kafka client.

Reading order: ``estimate`` (tokens before a tokenizer), ``prepare`` (a request into a record),
``backends/`` (confluent-kafka and kafka-python behind one page), ``client`` (``Client``, ``AsyncClient``).

Must not know: engines. Importing ``Client`` imports neither sqlalchemy, torch nor vllm.
"""
