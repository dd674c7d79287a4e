"""Documents in any order inside vLLM, from Python: needs vLLM beside kvmosaic.

python examples/vllm_offline.py Qwen/Qwen3-0.6B
"""

import sys

from vllm import LLM, SamplingParams

from kvmosaic.vllm import chat, engine_arguments, generate

FERRY = "The ferry to Oak Island leaves at nine. It carries bicycles."
MILL = "The mill was built in 1907. It grinds oats."
SYSTEM = "Answer the question from the documents."


def main(model: str) -> None:
    llm = LLM(model, max_model_len=1024, **engine_arguments())
    params = SamplingParams(temperature=0, max_tokens=16)

    # a text with separators: computed the first time, then moved to wherever it is asked for
    for documents in ((FERRY, MILL), (MILL, FERRY)):
        prompt = " ## ".join((SYSTEM, *documents, "When does the ferry leave?"))
        (output,) = generate(llm, prompt, params, separator="##", use_tqdm=False)
        report = output.kv_transfer_params["kvmosaic"]
        print(output.outputs[0].text.strip(), [document["action"] for document in report["documents"]])

    # a conversation, if the model has a chat template
    if llm.get_tokenizer().chat_template:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What does the mill grind?"}]
        documents = [{"title": "Mill", "text": MILL}, {"title": "Ferry", "text": FERRY}]
        (output,) = chat(llm, messages, params, documents=documents, repair="first(8)", use_tqdm=False)
        print(output.outputs[0].text.strip(), output.kv_transfer_params["kvmosaic"]["composition"])


if __name__ == "__main__":
    main(sys.argv[1])
