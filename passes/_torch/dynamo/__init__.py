"""The use of dynamo: traces of a call, what dynamo is taught for them, and the side effects that it finds."""
