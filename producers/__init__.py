"""Gets requests in, fast and safely: the client library, over either Kafka client.

Reading order: ``estimate`` (tokens before a tokenizer), ``prepare`` (a request into a record), ``lines`` (requests from
a file), ``backends/`` (confluent-kafka and kafka-python behind one page), ``deliveries`` (what is on its way),
``replies`` (what is awaited), ``core``, ``client`` (``Client``, ``AsyncClient``).

Must not know: engines. Importing ``Client`` imports neither sqlalchemy, torch nor vllm.
"""
