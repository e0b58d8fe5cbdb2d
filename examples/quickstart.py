"""A long prompt in a fifth of the bytes, with generate() as it is.

python examples/quickstart.py            # the 135M model that `make demo` installs
python examples/quickstart.py my/model   # a local folder or a Hub id
"""

import sys

import torch

from qevict import QEvictCache, QEvictConfig
from qevict.compat import cache_argument
from qevict.models import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
text = "The archive is in the blue house. " + "It was a quiet year on the island. " * 150 + "Where is the archive?"
prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")

config = QEvictConfig(budget=0.2, store_dtype=torch.bfloat16)
cache = QEvictCache(model, config, max_new_tokens=24)
# cache_argument gives cache= or past_key_values=, whichever this version of Transformers calls it
output = model.generate(**inputs, **cache_argument(cache), max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(f"{cache.memory().reserved:,} of {cache.memory().full_kv:,} bytes; {cache.counts()}; {cache.moves()}")
