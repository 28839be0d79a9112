#!/usr/bin/env bash
# tokenizers 0.23.3: with byte fallback a broken byte changes the character before it, and DecodeStream then raises.
#
# Neighbouring byte tokens are decoded together, all or nothing: after the two bytes of an e with an accent, a third
# that begins another character and is never completed turns all three into U+FFFD. DecodeStream has returned the
# letter by then. It raises at the next token, and at every one after it, whatever that is: the stream is lost. Targets
# that are sampled write such bytes now and then; a server has to start a new stream.
#
# Expected: one U+FFFD for the broken byte, the text before it unchanged, and no error for tokens of the vocabulary.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3

cat > "$directory/stream.py" <<'PYTHON'
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁so": 257}
tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def step(stream, token):
    try:
        return stream.step(tokenizer, token)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:14]}"


def show(*tokens):
    ids = [vocabulary[token] for token in tokens]
    print(*tokens)
    print("  decoded at once:", ascii(tokenizer.decode(ids)))
    stream = DecodeStream(skip_special_tokens=True)
    print("  step by step:", *(ascii(step(stream, token)) for token in ids))


show("▁so", "<0xC3>", "<0xA9>", "▁so", "▁so")
show("▁so", "<0xC3>", "<0xA9>", "<0xC3>", "▁so", "▁so", "▁so")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/stream.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
▁so <0xC3> <0xA9> ▁so ▁so
  decoded at once: ' so\xe9 so so'
  step by step: ' so' None '\xe9' ' so' ' so'
▁so <0xC3> <0xA9> <0xC3> ▁so ▁so ▁so
  decoded at once: ' so\ufffd\ufffd\ufffd so so so'
  step by step: ' so' None '\xe9' None 'Exception: Invalid prefix' 'Exception: Invalid prefix' 'Exception: Invalid prefix'
SEEN
