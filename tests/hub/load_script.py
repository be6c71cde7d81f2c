"""Load everything that was pushed with stock libraries only, compute logits and generate. Run with the local Hub as endpoint.

python load_script.py OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

IDS = torch.tensor([[5, 77, 99, 3, 3, 142, 210, 7, 64, 31, 12, 8]])
out = Path(sys.argv[1])
expected = torch.load(out / "expected.pt")
dequantize = {"quantization_config": Mxfp4Config(dequantize=True)}
tokenizer = AutoTokenizer.from_pretrained("tester/full")

models = {
    "full": lambda: AutoModelForCausalLM.from_pretrained("tester/full"),
    "full#mxfp4": lambda: AutoModelForCausalLM.from_pretrained("tester/full", subfolder="mxfp4", **dequantize),
    "quantised": lambda: AutoModelForCausalLM.from_pretrained("tester/quantised", **dequantize),
    "adapter": lambda: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out / "base"), "tester/adapter"),
    "merged": lambda: AutoModelForCausalLM.from_pretrained("tester/merged"),
    "merged#mxfp4": lambda: AutoModelForCausalLM.from_pretrained("tester/merged", subfolder="mxfp4", **dequantize),
}
for name, load in models.items():
    model = load().eval()
    with torch.no_grad():
        difference = (model(IDS).logits - expected[name]).abs().max().item()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 1"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    print(f"{name} {difference:.3e} {generated.shape[1] - inputs['input_ids'].shape[1]}")
assert not [module for module in sys.modules if module.startswith("trl_gptoss")]
