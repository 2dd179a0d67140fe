#!/usr/bin/env python3
"""Make the labelled set that gend/verdict.py is measured on (tests/data/labelled_replies.jsonl.gz).

    label_replies.py collect URL FILE [--prompts MORE.jsonl]   real replies of an OpenAI-compatible server, no labels
    label_replies.py label FILE                                shows each reply without a label, reads the label
    label_replies.py made FILE                                 adds the hand-made failures and hard cases, labelled

FILE is JSON lines, gzipped where its name ends in .gz; rows that are there stay, rows with a known id are not made
again. A row: `id`; `group` (rows of one prompt or one construction); `by` ("eye" or "made": who labelled it); `split`
("tune" or "test", by group, so that no near-twin of a tuned row is tested); `thinking` and `max_tokens` as asked;
`reply` (gend.records.Reply without its nulls); `label`, and `doubt` where a second reader might say another word.

Labels are never gend's own verdicts: a real reply gets what a reader says of it, a made one what it was made to be.
Reader's rule: `loop` = from some point to the end (a closing line may follow) the same passage comes again and again,
three times or more, word for word or with only a number or a name changed, so that nothing new is said; a list that the
prompt asked for is no loop. `salad` = pieces of words or symbols, but no language: no verdict, so counted on its own.
"""

import argparse
import base64
import gzip
import json
import random
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LABELS = ("ok", "length", "empty", "unclosed", "loop", "junk", "no_thinking", "abort", "salad")

# Prompts for real replies: everyday ones, those that ask for repetitive but right text, and those that small models
# answer with a loop. Other languages, symbols, code and mathematics are there to tempt `junk`.
PROMPTS = """
Explain to a child why the sky is blue.
Write a letter to a landlord about a broken heater.
What are the causes of the First World War?
Compare electric cars and petrol cars in a table.
Give me a recipe for onion soup with exact amounts.
Write a short story about a lighthouse keeper who finds a bottle.
Summarise the plot of Hamlet in five sentences.
Who are you?
Say hello.
What is 17 times 23? Only the number.
Is 97 a prime number? Answer yes or no.
Write a haiku about rain.
List the days of the week.
Name twenty animals that live in the sea.
List the numbers from 1 to 100, one on each line.
Count down from 60 to zero.
Write the multiplication tables from 1 to 9.
Write a list of one hundred ideas for a birthday party.
List all prime numbers below 200.
Write a poem with a refrain after each stanza.
Write the song about ninety-nine bottles, all verses.
Write a JSON array with fifteen made-up users: id, name, email, city.
Write a CSV file with twenty rows of weather data.
Write an HTML table with twelve rows of countries and their capitals.
Write SQL INSERT statements for fifteen products.
Write a Python function that sorts a list by bubble sort, with comments.
Write a Python class for a bank account with deposit, withdraw and balance.
Write unit tests for a function add(a, b) in Python.
Write a C program that prints the Fibonacci numbers.
Write a JavaScript function that reverses a string, in three ways.
Write a switch statement in Java that maps month numbers to names.
Write a Makefile for a project with five C files.
Write a YAML file for a Docker setup with a web server and a database.
Write a regular expression for an e-mail address and explain each part.
Draw a cat in ASCII art.
Draw a box of stars, ten wide and five high.
Draw a chess board with letters.
Answer with three emoji: how do you feel?
Explain the quadratic formula in LaTeX.
Prove that the square root of two is irrational.
Derive the derivative of x squared from first principles in LaTeX.
Solve 3x + 7 = 22 step by step.
Translate "good morning" into ten languages.
Bonjour, peux-tu me raconter une histoire courte en français ?
Schreibe einen kurzen Text über den Herbst auf Deutsch.
Escribe un poema sobre el mar en español.
请用中文写一段关于春天的短文。
日本語で自己紹介をしてください。
اكتب فقرة قصيرة عن القاهرة باللغة العربية.
हिंदी में दिल्ली के बारे में कुछ वाक्य लिखिए।
Напиши короткий рассказ о собаке на русском языке.
Repeat the word "yes" forever.
Write "All work and no play makes Jack a dull boy" as often as you can.
Tell me everything about everything, without stopping.
Continue: one, two, three, four,
Continue this sequence as far as you can: 2, 4, 8, 16,
What is the meaning of life? Think about it for a very long time.
Think step by step: is there a largest prime number? Check every step twice.
Write a dialogue between two people who cannot agree, without an end.
Write a very long essay on the history of bread.
Write a legal contract for renting a boat, with numbered paragraphs.
Write the alphabet backwards, then forwards, then backwards again.
Encode "the quick brown fox" in base64 and in hexadecimal.
Write the first 200 digits of pi.
Write a DNA sequence of 300 bases.
Write a truth table for four variables.
Write a training plan for twelve weeks, with each day.
Give me fifty synonyms for "good".
Give a quiz with twenty questions and answers on geography.
What does the tag <b> do in HTML?
""".strip().splitlines()

# Asked after all thresholds had been chosen, so that their replies test and never tune; long, as loops are in earnest.
FRESH_PROMPTS = """
Tell me about the history of chess.
Write an article on the migration of birds.
How do I repair a bicycle tyre?
Explain photosynthesis in detail.
Write a speech for a wedding.
What is the difference between a virus and a bacterium?
Describe a walk through an old town at night.
List fifty countries with their capitals.
Write a Python script that reads a CSV file and prints the sum of each column.
Write a function in C that reverses a linked list.
Give me a weekly meal plan with shopping list.
Write a long fairy tale about a fox and a miller.
Explain how a computer processor executes instructions.
Write a product description for a kettle.
Make a list of thirty English idioms with explanations.
Summarise the rules of football.
Write a cover letter for a job as a gardener.
Explain inflation and its causes.
Write a poem about winter in eight stanzas.
Solve: a train leaves at 9:00 with 80 km/h, another at 10:00 with 120 km/h. When do they meet?
What is 12 factorial? Show each step.
Write a bash script that backs up a folder every night.
Write the first 50 square numbers.
Write a SQL schema for a library.
Describe each planet of the solar system in one paragraph.
Explain recursion with many examples.
Write an interview with a famous violinist.
Give arguments for and against zoos.
Write a user manual for a washing machine.
Write a JSON configuration for a web server with ten routes.
Write a list of 100 boys' names.
Write a markdown table with the months and their number of days.
Tell me a joke, then explain it at length.
Write a blog post on how to learn a language.
Describe the water cycle.
Write an HTML page with a form of twelve fields.
Write ten haiku about the sea.
Write a play with three characters in a lift.
How does a bank make money? Think carefully.
Count from 1 to 200 in words.
Compare Python and Java in ten points.
Write a letter from a soldier to his mother.
Explain the theory of relativity to a grandmother.
Write a hymn to the sun with a chorus.
""".strip().splitlines()
FRESH_SETTING = (0.2, 1600)

# temperature and max_tokens: greedy and long is where small models loop; hot is where they come apart.
SETTINGS = ((0.0, 1100), (0.8, 450), (1.3, 220))

Task = tuple[str, str, float, int, bool]
"""Group, prompt, temperature, max_tokens, and whether to think."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect_parser = commands.add_parser("collect")
    collect_parser.add_argument("url", help="http://host:port/v1")
    collect_parser.add_argument("file", type=Path)
    collect_parser.add_argument("--prompts", type=Path, help="JSON lines with id and prompt; only their ids are kept")
    for name in ("label", "made"):
        commands.add_parser(name).add_argument("file", type=Path)
    args = parser.parse_args()
    rows = read(args.file)
    if args.command == "collect":
        collect(args.url, args.prompts, rows, args.file)
    elif args.command == "label":
        label(rows, args.file)
    else:
        rows.update((row["id"], row) for row in made())
        write(args.file, rows)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of `path` by id; none where there is no such file."""
    if not path.exists():
        return {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return {row["id"]: row for row in map(json.loads, lines)}


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """All rows, sorted by id. Escaped to ASCII: a lone surrogate in a reply is a case, not an accident."""
    text = "".join(json.dumps(rows[key], sort_keys=True) + "\n" for key in sorted(rows))
    # mtime 0 and a fixed level: the same rows give the same bytes.
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0) if path.suffix == ".gz" else text.encode())


def row_of(key: str, group: str, label: str | None, by: str, reply: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """One row of the set; what is null in the reply is left out."""
    return {
        "id": key,
        "group": group,
        "split": asked.get("split") or ("test" if zlib.crc32(group.encode()) >> 9 & 1 else "tune"),
        "label": label,
        "by": by,
        "thinking": asked.get("thinking", False),
        "max_tokens": asked.get("max_tokens", 16384),
        "reply": {name: value for name, value in reply.items() if value is not None},
        **({"doubt": True} if asked.get("doubt") else {}),
    }


# Real replies -------------------------------------------------------------------------------------------------------


def collect(url: str, more: Path | None, rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Ask for what is not in `rows`, four at a time, and write the file after every twenty replies.

    A reply that quotes a prompt of `more` is not kept: those prompts may not be ours to publish.
    """
    tasks: list[Task] = []
    for number, prompt in enumerate(PROMPTS):
        tasks += [(f"own-{number:02d}", prompt, *setting, False) for setting in SETTINGS]
        if number % 2 == 0:
            tasks.append((f"own-{number:02d}", prompt, 0.6, 600, True))
    for number, prompt in enumerate(FRESH_PROMPTS):
        tasks.append((f"fresh-{number:02d}", prompt, *FRESH_SETTING, thinks(f"fresh-{number:02d}")))
    for given in map(json.loads, more.read_text().splitlines() if more else []):
        tasks.append((given["id"], given["prompt"], 0.3, 400, thinks(given["id"])))
    tasks = [task for task in tasks if task_id(task) not in rows]
    with ThreadPoolExecutor(4) as pool:
        replies = pool.map(lambda task: ask(url, task), tasks)
        for count, (task, row) in enumerate(zip(tasks, replies, strict=True), 1):
            if task[0].startswith(("own-", "fresh-")) or not quotes(row["reply"], task[1]):
                rows[row["id"]] = row
            if count % 20 == 0 or count == len(tasks):
                write(path, rows)
                print(f"{count} of {len(tasks)}", file=sys.stderr)


def thinks(group: str) -> bool:
    """One prompt in four is answered with a thought."""
    return zlib.crc32(group.encode()) % 4 == 0


def task_id(task: Task) -> str:
    group, _, temperature, _, thinking = task
    return f"real-{group}-t{temperature}{'-thought' if thinking else ''}"


def ask(url: str, task: Task) -> dict[str, Any]:
    """One real reply. A model that does not think is made to: first the thought, then the answer that follows it.

    Put together as a server with a reasoning parser does it: a thought that is cut leaves content "".
    """
    group, prompt, temperature, max_tokens, thinking = task
    messages = [{"role": "user", "content": prompt}]
    thought = None
    if thinking:
        order = "Think aloud about how to answer, step by step. Do not answer yet.\n\n" + prompt
        choice, usage = chat(url, [{"role": "user", "content": order}], temperature, max_tokens)
        thought = choice["message"]["content"]
        usage["reasoning_tokens"] = usage["completion_tokens"]
        choice["message"]["content"] = "" if choice["finish_reason"] == "length" else None
        messages += [{"role": "assistant", "content": thought}, {"role": "user", "content": "Now answer."}]
    if not thinking or choice["message"]["content"] is None:
        spent = usage["completion_tokens"] if thinking else 0
        choice, usage = chat(url, messages, temperature, max_tokens)
        usage |= {"completion_tokens": usage["completion_tokens"] + spent, "reasoning_tokens": spent}
    reply = {
        "content": choice["message"]["content"],
        "reasoning_content": thought,
        "finish_reason": choice["finish_reason"],
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens")},
    }
    split = "test" if group.startswith("fresh-") else None
    return row_of(task_id(task), group, None, "eye", reply, thinking=thinking, max_tokens=max_tokens, split=split)


def quotes(reply: dict[str, Any], prompt: str) -> bool:
    """Whether 50 characters of the prompt stand in the reply."""
    prompt = " ".join(prompt.split())
    text = " ".join(f"{reply.get('reasoning_content')} | {reply.get('content')}".split())
    return any(prompt[at : at + 50] in text for at in range(max(1, len(prompt) - 49)))


def chat(url: str, messages: list[dict[str, str]], temperature: float, max_tokens: int) -> tuple[Any, Any]:
    body = {"messages": messages, "temperature": temperature, "max_tokens": max_tokens, "seed": 7}
    request = urllib.request.Request(
        url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return answer["choices"][0], answer["usage"]


def label(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Show each reply without a label and read one: a word of LABELS, with `?` after it where in doubt; q to stop."""
    for row in [row for row in rows.values() if row["label"] is None]:
        reply = row["reply"]
        print(f"\n===== {row['id']}  {reply['finish_reason']}  {reply['usage']['completion_tokens']} tokens")
        for part in ("reasoning_content", "content"):
            text = reply.get(part) or ""
            shown = text if len(text) < 900 else text[:300] + " [...] " + text[-600:]
            print(f"--- {part}, {len(text)} characters\n{shown}")
        word = ""
        while word.rstrip("?") not in LABELS:
            word = input(f"{' '.join(LABELS)}, q > ").strip()
            if word == "q":
                write(path, rows)
                return
        row["label"] = word.rstrip("?")
        if word.endswith("?"):
            row["doubt"] = True
    write(path, rows)


# Made replies -------------------------------------------------------------------------------------------------------

PROSE = """
The mill stood where the two streams met, and for as long as anyone could remember it had ground the valley's corn. In
autumn the carts came down from the upper farms before dawn, and the miller, who slept badly, would already be sitting
on the sluice with his pipe, listening to the water and guessing from its note how much rain had fallen in the hills.

Yeast eats sugar and gives off carbon dioxide; flour and water, worked for ten minutes, make a net of gluten that holds
the gas. That is all there is to bread, and yet no two bakers agree. One swears by a cold night in the cellar, another
by a spoon of rye in the starter, a third salts late because she thinks that salt added early makes the crumb tight.

To move the database without a pause, first let the old and the new store take every write. Then copy what is old in
small batches, lowest key first, and compare checksums of each batch. Only when a full week has passed without a
difference do the reads go to the new one, a few per cent at a time, with a switch within reach to take them back.

Our second day in the mountains began with fog so thick that the guide tied bells to the mules. Nobody spoke. Around
eleven the wind turned, the whole bowl of the glacier lay open beneath us, and Marta, who had complained since Bergamo
about her boots, took out her sketchbook and would not move until the light had gone from the western ridge.

A bond's price falls when interest rates rise, because its fixed coupons are then worth less than those of a new bond.
How far it falls depends on how long one has to wait for the money: a ten-year bond loses roughly eight per cent for
each point, a two-year bond less than two. Banks that forget this borrow short, lend long, and meet their depositors.

Octopuses have three hearts and blue blood, and most of their neurons sit in the arms. An arm that has been cut off
will still pull food towards where the mouth used to be. In an aquarium in Otago one of them learned to squirt the lamp
above its tank, shorting it every night, until the staff gave up and released it into the harbour in disgust.
""".strip().split("\n\n")

THOUGHTS = """
Okay, the user wants the number of ways to tile a 3 by 8 board with dominoes. Let me set up the recurrence. For width n,
f(n) = 4 f(n-2) - f(n-4), with f(0) = 1 and f(2) = 3. So f(4) = 4*3 - 1 = 11, f(6) = 44 - 3 = 41, f(8) = 164 - 11 = 153.

Wait, I should double-check f(4). Splits into two blocks of width 2 give 9; the ones that cannot be split, 2. That makes
11, which agrees. Good. And for f(6): 3*11 + 2*3 + 2*1 = 33 + 6 + 2 = 41. Yes.

Hmm, but does the question count reflections as the same? It says "number of ways" without saying more, so no. I'll
answer 153 and show the recurrence, since a reader will want to see where the 4 comes from.

Alternatively, think of it as a transfer matrix on the profile of the last column: states 000, 011, 110, and their
complements. The count of closed walks of length 8 from 000 must come out the same. One check is enough, though.
""".strip().split("\n\n")

CODE = [
    """def merge(left, right):
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    return out + left[i:] + right[j:]
""",
    """class Stack:
    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()
""",
    """int gcd(int a, int b) {
    while (b != 0) {
        int t = a % b;
        a = b;
        b = t;
    }
    return a;
}
""",
    """SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS spent
FROM customers c LEFT JOIN orders o ON o.customer_id = c.id
WHERE o.created_at >= DATE '2024-01-01'
GROUP BY c.name HAVING SUM(o.total) > 100 ORDER BY spent DESC;
""",
]

TONGUES = {
    "chinese": "春天来了，河边的柳树最先发芽。早晨起雾的时候，老人们提着鸟笼在公园里散步，孩子们背着书包从桥上跑过。"
    "我家楼下的面馆又开门了，老板说今年的蒜苗特别嫩。到了下午，太阳照在旧砖墙上，猫就躺在那里不肯动。",
    "chinese-code": "要在Python里读取大文件，不要用read()一次读完，而是用for line in f逐行处理。如果文件是gzip压缩的，"
    "可以用gzip.open('data.gz', 'rt')打开。内存占用大约只有几MB，而不是几GB。",
    "japanese": "はじめまして、田中と申します。大阪の小さな町で生まれ、今は東京で地図を作る会社に勤めています。"
    "週末は自転車で川沿いを走ったり、古本屋でSF小説を探したりします。去年から陶芸も始めましたが、まだ茶碗が丸くなりません。",
    "korean": "제가 사는 동네에는 오래된 시장이 있습니다. 아침마다 두부 장수 아주머니가 종을 울리면 골목이 깨어납니다. "
    "비가 오는 날에는 빈대떡 냄새가 지하철역까지 퍼져서, 우산을 접고 한 장 먹지 않고는 지나갈 수가 없습니다.",
    "arabic": "القاهرة مدينة لا تنام. في الصباح يملأ باعة الخبز الأزقة القديمة، ويعبر الصيادون النيل بقواربهم الصغيرة. "
    "وعند المغرب تمتلئ المقاهي بلاعبي الطاولة، ويتحدث الناس عن الحر وعن المباراة وعن ارتفاع أسعار الطماطم.",
    "hindi": "दिल्ली की सर्दियों में सुबह का कोहरा इतना घना होता है कि सामने की गली भी नहीं दिखती। चाय वाले अपनी "
    "केतली चढ़ा देते हैं और लोग अखबार लेकर उनके पास खड़े हो जाते हैं। दोपहर को धूप निकलती है तो छतों पर मूँगफली बिकती है।",
    "russian": "Собаку звали Буран, хотя ничего бурного в ней не было. Она спала у печки, пропускала мимо себя кошек и "
    "только по вечерам, когда на станции гудел последний поезд, поднимала голову и слушала, не идёт ли с него хозяин.",
    "greek": "Το καΐκι έφυγε πριν ξημερώσει, φορτωμένο καρπούζια και δύο κατσίκες. Στο λιμάνι "
    "έμεινε μόνο ο φαροφύλακας, "
    "που έπινε τον καφέ του και μετρούσε τα κύματα, όπως έκανε κάθε μέρα από τότε που έφυγαν τα παιδιά του.",
    "hebrew": "בשוק של יום שישי אי אפשר לזוז. מוכר הזיתים צועק, ילדה מחפשת את אבא שלה, ומישהו "
    "מנגן על אקורדיון שיר ישן. "
    "סבתא שלי בודקת כל עגבנייה בנפרד, ובסוף קונה בדיוק את הארבע הראשונות שנגעה בהן.",
    "thai": "ตลาดน้ำเปิดตั้งแต่เช้ามืด แม่ค้าพายเรือมาจากคลองเล็ก ๆ พร้อมผลไม้และขนมที่ทำเมื่อคืน นักท่องเที่ยวมาถึงตอนสาย "
    "แต่คนในหมู่บ้านกลับบ้านไปนอนแล้ว เหลือแต่หมาสีน้ำตาลตัวหนึ่งที่รอเศษปลาอยู่ใต้สะพาน",
    "turkish": "Vapur iskeleye yanaşırken martılar simit kapmak için yarışıyordu. Yaşlı bir adam gazetesini katladı, "
    "çayının son yudumunu içti ve karşı kıyıda otuz yıldır hiç değişmeyen o kırmızı çatılı eve baktı.",
    "vietnamese": "Quán phở đầu ngõ mở từ năm giờ sáng. Ông chủ không bao giờ hỏi khách ăn gì, vì "
    "ông nhớ hết: người thích "
    "nhiều hành, người không ăn mỡ. Mưa xuống, cả phố dắt xe vào dưới mái hiên, chuyện trò như đã quen nhau từ lâu.",
}

HALVES = ("tune", "test")  # for groups that their hash would all put into one

NAMES = [
    "Ada",
    "Boris",
    "Chen",
    "Dalia",
    "Emeka",
    "Freya",
    "Goran",
    "Hana",
    "Ivo",
    "Jun",
    "Kira",
    "Luis",
    "Mona",
    "Nils",
    "Olga",
    "Pavel",
    "Quinn",
    "Rosa",
    "Sami",
    "Tara",
]
CITIES = [
    "Lisbon",
    "Oslo",
    "Quito",
    "Accra",
    "Hanoi",
    "Izmir",
    "Turku",
    "Graz",
    "Bari",
    "Split",
    "Cusco",
    "Kyoto",
    "Tunis",
    "Derby",
    "Lyon",
    "Basel",
    "Cork",
    "Perm",
]
THINGS = [
    "lamp",
    "kettle",
    "ladder",
    "anvil",
    "compass",
    "bucket",
    "saddle",
    "lantern",
    "shovel",
    "barrel",
    "blanket",
    "mirror",
    "candle",
    "hammer",
    "rope",
]


def made() -> Iterator[dict[str, Any]]:
    """Every hand-made row. Deterministic."""
    rng = random.Random(7)
    for name, text in right_texts(rng).items():
        group = "right-" + name.rsplit("/", 1)[0]
        yield made_row(f"right-{name}", group, "ok", text)
    yield from thinking_rows(rng)
    yield from cut_rows()
    yield from aborted_rows()
    yield from empty_rows()
    yield from thoughtless_rows()
    yield from unclosed_rows()
    yield from loop_rows(rng)
    yield from junk_rows(rng)
    yield from salad_rows(rng)


def made_row(
    key: str,
    group: str,
    label: str,
    content: str | None,
    thought: str | None = None,
    finish: str | None = "stop",
    **more: Any,
) -> dict[str, Any]:
    """Token counts are guesses from the length (four characters a token), unless given."""
    tokens, thought_tokens = len(content or "") // 4 + 1, len(thought or "") // 4
    usage = {"prompt_tokens": 40, "completion_tokens": tokens + thought_tokens, "reasoning_tokens": thought_tokens}
    reply = {
        "content": content,
        "reasoning_content": thought,
        "tool_calls": more.pop("tool_calls", None),
        "finish_reason": finish,
        "usage": more.pop("usage", usage),
    }
    more.setdefault("thinking", thought is not None)
    return row_of(f"made-{key}", group, label, "made", reply, **more)


def right_texts(rng: random.Random) -> dict[str, str]:
    """Right answers that look wrong to a counter of repetitions or of symbols. The key is name or name/variant."""
    person = lambda: (rng.choice(NAMES), rng.choice(CITIES), rng.randrange(18, 80))  # noqa: E731
    people = [person() for _ in range(60)]
    texts = {f"prose/{n}": text for n, text in enumerate(PROSE)}
    texts |= {f"tongue-{name}": text for name, text in TONGUES.items()}
    texts |= {f"code-{n}": f"```\n{text}```" for n, text in enumerate(CODE)}
    texts["times-table/9"] = "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 10) for b in range(1, 11))
    texts["times-table/13"] = "\n".join(f"13 x {b} = {13 * b}" for b in range(1, 41))
    texts["times-grid"] = "\n".join("| " + " | ".join(str(a * b) for b in range(1, 13)) + " |" for a in range(1, 13))
    texts["count/100"] = "\n".join(map(str, range(1, 101)))
    texts["count/500"] = ", ".join(map(str, range(1, 501)))
    texts["count/down"] = "\n".join(f"{n}..." for n in range(60, -1, -1))
    texts["evens"] = "The even numbers are " + ", ".join(map(str, range(2, 1200, 2))) + "."
    texts["squares"] = "\n".join(f"{n}² = {n * n}" for n in range(1, 101))
    texts["primes"] = ", ".join(str(n) for n in range(2, 1500) if all(n % d for d in range(2, int(n**0.5) + 1)))
    texts["powers"] = "\n".join(f"2^{n} = {2**n}" for n in range(64))
    texts["googol"] = "A googol is 1" + "0" * 100 + "."
    texts["pi-like"] = "3." + "".join(rng.choice("0123456789") for _ in range(600))
    texts["dna"] = "".join(rng.choice("ACGT") for _ in range(600))
    texts["bits"] = "\n".join(f"{n:3d} = {n:08b}" for n in range(128))
    texts["coin-flips"] = " ".join(rng.choice(["heads", "tails"]) for _ in range(150))
    texts["truth-table"] = "\n".join(
        f"| {a} | {b} | {c} | {d} | {int((a and b) or (c and d))} |"
        for a in (0, 1)
        for b in (0, 1)
        for c in (0, 1)
        for d in (0, 1)
    )
    texts["identity"] = "[" + ",\n ".join(str([int(a == b) for b in range(12)]) for a in range(12)) + "]"
    texts["zeros"] = (
        "grid = [\n" + "    [0, 0, 0, 0, 0, 0, 0, 0],\n" * 8 + "]\n\nEach of the eight rows is a list of zeros."
    )
    texts["json-users/15"] = json.dumps(
        [{"id": n, "name": p[0], "city": p[1], "age": p[2]} for n, p in enumerate(people[:15])], indent=2
    )
    texts["json-users/60"] = json.dumps(
        [
            {
                "id": n,
                "name": p[0],
                "email": f"{p[0].lower()}@{p[1].lower()}.example",
                "city": p[1],
                "active": p[2] > 40,
            }
            for n, p in enumerate(people)
        ],
        indent=2,
    )
    texts["csv"] = "name,city,age\n" + "\n".join(f"{a},{b},{c}" for a, b, c in people)
    texts["markdown-table"] = "| Name | City | Age |\n|------|------|-----|\n" + "\n".join(
        f"| {a} | {b} | {c} |" for a, b, c in people[:40]
    )
    texts["html-table"] = (
        "<table>\n"
        + "".join(f"  <tr>\n    <td>{a}</td>\n    <td>{b}</td>\n    <td>{c}</td>\n  </tr>\n" for a, b, c in people[:25])
        + "</table>"
    )
    texts["sql-insert"] = "\n".join(
        f"INSERT INTO products (id, name, price, stock) VALUES ({n}, '{rng.choice(THINGS)}', "
        f"{rng.randrange(100, 9900) / 100:.2f}, {rng.randrange(200)});"
        for n in range(1, 31)
    )
    texts["log"] = "\n".join(
        f"2024-05-{rng.randrange(1, 28):02d} {rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d} "
        f"INFO "
        f"worker[{rng.randrange(9)}] finished task {rng.randrange(10**5)} in {rng.randrange(900)} ms"
        for _ in range(40)
    )
    months = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ]
    texts["switch"] = (
        "switch (month) {\n"
        + "".join(f'    case {n}:\n        return "{month}";\n' for n, month in enumerate(months, 1))
        + '    default:\n        throw new IllegalArgumentException("no month " + month);\n}'
    )
    texts["unit-tests"] = "".join(
        f"def test_add_{n}():\n    assert add({a}, {b}) == {a + b}\n\n\n"
        for n, (a, b) in enumerate((rng.randrange(-50, 99), rng.randrange(-50, 99)) for _ in range(18))
    )
    texts["getters"] = "".join(
        f"    public String get{w.title()}() {{\n        return this.{w};\n    }}\n\n"
        f"    public void set{w.title()}(String {w}) {{\n        this.{w} = {w};\n    }}\n\n"
        for w in THINGS[:9]
    )
    texts["css"] = "".join(
        f".{w} {{\n  margin: {rng.randrange(20)}px;\n  padding: {rng.randrange(20)}px;\n"
        f"  color: #{rng.randrange(1 << 24):06x};\n}}\n\n"
        for w in THINGS
    )
    texts["yaml"] = "services:\n" + "".join(
        f"  {w}:\n    image: registry.example/{w}:{rng.randrange(9)}.{rng.randrange(9)}\n    restart: always\n"
        f'    ports:\n      - "{rng.randrange(3000, 9999)}:80"\n'
        for w in THINGS[:12]
    )
    texts["assembly"] = "\n".join(
        f"    mov r{rng.randrange(16)}, [rsp+{8 * rng.randrange(30)}]\n"
        f"    add r{rng.randrange(16)}, r{rng.randrange(16)}"
        for _ in range(30)
    )
    texts["base64"] = base64.b64encode(" ".join(PROSE[0:2]).encode()).decode()
    texts["hex-dump"] = "\n".join(
        f"{at:08x}  {PROSE[2][at : at + 16].encode().hex(' ')}  |{PROSE[2][at : at + 16]}|".replace("\n|", ".|")
        for at in range(0, 320, 16)
    )
    texts["brainfuck"] = (
        "++++++++[>++++[>++>+++>+++>+<<<<-]>+>+>->>+[<]<-]>>.>---.+++++++..+++.>>.<-.<.+++.------.--------.>>+.>++."
    )
    texts["regex"] = r"^(?:[a-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[a-z0-9!#$%&'*+/=?^_`{|}~-]+)*)@(?:[a-z0-9-]+\.)+[a-z]{2,}$"
    texts["ascii-cat"] = " /\\_/\\\n( o.o )\n > ^ <\n/|   |\\\n(_|   |_)"
    texts["ascii-box"] = "+----------+\n|          |\n|          |\n|          |\n+----------+"
    texts["ascii-tree"] = "\n".join(" " * (9 - n) + "*" * (2 * n + 1) for n in range(10)) + "\n        |||\n        |||"
    texts["star-box"] = "Here it is:\n\n```\n" + "\n".join(["**********"] * 5) + "\n```"
    texts["drawn-table"] = (
        "╔══════════╦════════╗\n║ Name     ║ Age    ║\n╠══════════╬════════╣\n"
        + "\n".join(f"║ {a:<8} ║ {c:<6} ║" for a, _, c in people[:12])
        + "\n╚══════════╩════════╝"
    )
    texts["bar-chart"] = "\n".join(f"{month[:3]} | {'#' * rng.randrange(4, 40)}" for month in months)
    texts["chess"] = "\n".join(
        ["r n b q k b n r", "p p p p p p p p", *[". . . . . . . ."] * 4, "P P P P P P P P", "R N B Q K B N R"]
    )
    texts["rule"] = PROSE[3] + "\n\n" + "-" * 80 + "\n\n" + PROSE[4] + "\n\n" + "=" * 80
    texts["form"] = "\n".join(f"{label}: {'_' * 40}" for label in ("Name", "Street", "Town", "Date", "Signature"))
    texts["emoji/three"] = "😀🎉🌧️"
    texts["emoji/one"] = "👍"
    texts["emoji/row"] = "🎂" * 12
    texts["emoji/story"] = "👧🏽🚶‍♀️🌲🌲🌲🐺❓ 👧🏽➡️👵🏠 🐺🏃💨 🐺👵😱 🐺🛏️ 👧🏽👀👂👄❗ 🪓👨‍🌾💥🐺 👵👧🏽🎉"
    for name, text in {
        "number": "391", "letter": "B", "yes": "Yes.", "one-word": "Paris", "han": "是", "math": "$x = 5$",
        "list": "[]", "object": "{}", "minus": "-7", "code": "`a + b`", "plus": "+",
        "sentence": "The capital of Peru is Lima.",
    }.items():  # fmt: skip
        texts[f"short/{name}"] = text
    texts["laugh"] = "Hahahahahahahaha! That one got me. 哈哈哈哈哈哈哈哈哈哈"
    texts["latex-quadratic"] = (
        "\\begin{align}\nax^2 + bx + c &= 0 \\\\\nx^2 + \\frac{b}{a}x &= -\\frac{c}{a} \\\\\n"
        "\\left(x + \\frac{b}{2a}\\right)^2 &= \\frac{b^2 - 4ac}{4a^2} \\\\\n"
        "x &= \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}\n\\end{align}"
    )
    texts["latex-matrix"] = (
        "\\begin{pmatrix}\n"
        + " \\\\\n".join(" & ".join(f"a_{{{a}{b}}}" for b in range(1, 8)) for a in range(1, 8))
        + "\n\\end{pmatrix}"
    )
    texts["greek-maths"] = (
        "Let ε > 0, δ = ε/(2|α|+1). Then |f(x)−f(x₀)| ≤ Σₙ λₙ·Δx + ∫₀^π sinθ dθ < ε, for all x∈ℝ. ∎ " * 1
    )
    texts["chemistry"] = "2 H₂ + O₂ → 2 H₂O; CH₄ + 2 O₂ → CO₂ + 2 H₂O; Fe₂O₃ + 3 CO → 2 Fe + 3 CO₂"
    texts["days-of-christmas"] = christmas()
    texts["house-that-jack-built"] = jack()
    texts["bottles"] = "\n\n".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer.\nTake one down and pass it around, "
        f"{n - 1} bottles of beer on the wall."
        for n in range(30, 1, -1)
    )
    texts["refrain"] = "\n\n".join(
        line + "\nRow, brother, row, for the tide will not wait,\nRow, brother, row, for the hour is late."
        for line in (
            "The harbour lights are sinking low,\nThe wind has turned to sleet and snow,",
            "My father's coat, my father's oar,\nHe never brought them back to shore,",
            "The lamp is out on Kerran Head,\nAnd half the men we knew are dead,",
            "But bread is dear and children cry,\nSo out we go, both you and I,",
            "The gulls go home, the nets are in,\nThere's salt upon my brother's chin,",
        )
    )
    texts["dialogue"] = "\n".join(
        f"{who}: {said}"
        for who, said in zip(
            ["Anna", "Ben"] * 8,
            ["Did you lock the shed?", "I thought you did.", "I asked you to.", "You asked me to oil it.", "Oil what?",
             "The lock.", "So you were there.", "I was, on Tuesday.", "It's Friday.", "Then it's oiled.", "And open.",
             "And open.", "My bicycle is in it.", "Not any more.", "What?", "I rode it to the shop. Relax."],
            strict=True,
        )
    )  # fmt: skip
    texts["clauses"] = "\n\n".join(
        f"{n}. The Hirer shall {duty}, failing which the Owner may end this agreement by notice in writing."
        for n, duty in enumerate(
            ["keep the boat at its mooring overnight", "pay the fee on the first day of each month",
             "report damage at once", "carry no more than six persons", "not sail beyond the outer buoy",
             "keep the engine serviced", "return the boat with a full tank",
             "insure the boat against theft", "show the licence when asked"], 1)
    )  # fmt: skip
    texts["good-morning"] = (
        "English: Good morning\nGerman: Guten Morgen\nFrench: Bonjour\nRussian: Доброе утро\n"
        "Greek: Καλημέρα\nHebrew: בוקר טוב\n"
        "Arabic: صباح الخير\nHindi: सुप्रभात\nThai: สวัสดีตอนเช้า\nChinese: 早上好\n"
        "Japanese: おはようございます\nKorean: 좋은 아침입니다\n"
        "Georgian: დილა მშვიდობისა\nArmenian: Բարի լույս\nTamil: காலை வணக்கம்\nBengali: সুপ্রভাত"
    )
    texts["hanja"] = (
        "大韓民國(대한민국)의 首都는 서울이다. 漢字로 쓰면 學校는 '배우는 집', 圖書館은 '책을 두는 집'이라는 뜻이 된다."
    )
    texts["plan"] = "\n".join(
        f"Week {week}, {day}: run {rng.randrange(3, 15)} km "
        + rng.choice(["easy", "steady", "with hills", "in intervals"])
        for week in range(1, 9) for day in ("Monday", "Wednesday", "Saturday")
    )  # fmt: skip
    texts["synonyms"] = ", ".join(
        [
            "fine",
            "excellent",
            "decent",
            "sound",
            "pleasant",
            "worthy",
            "capital",
            "splendid",
            "proper",
            "kind",
            "able",
            "skilled",
            "upright",
            "honest",
            "first-rate",
            "choice",
            "sterling",
            "superb",
            "noble",
            "virtuous",
            "bracing",
            "apt",
            "useful",
            "helpful",
            "fit",
            "solid",
            "grand",
            "tidy",
            "smart",
            "lucky",
        ]
    )
    return texts


def christmas() -> str:
    gifts = (
        "a partridge in a pear tree", "two turtle doves", "three French hens", "four calling birds", "five gold rings",
        "six geese a-laying", "seven swans a-swimming", "eight maids a-milking", "nine ladies dancing",
        "ten lords a-leaping", "eleven pipers piping", "twelve drummers drumming",
    )  # fmt: skip
    days = [
        "first",
        "second",
        "third",
        "fourth",
        "fifth",
        "sixth",
        "seventh",
        "eighth",
        "ninth",
        "tenth",
        "eleventh",
        "twelfth",
    ]
    return "\n\n".join(
        f"On the {day} day of Christmas my true love gave to me\n" + ",\n".join(gifts[n::-1])
        for n, day in enumerate(days)
    )


def jack() -> str:
    lines = (
        "the malt that lay in", "the rat that ate", "the cat that killed", "the dog that worried",
        "the cow with the crumpled horn that tossed", "the maiden all forlorn that milked",
        "the man all tattered and torn that kissed", "the priest all shaven and shorn that married",
    )  # fmt: skip
    return "This is the house that Jack built.\n\n" + "\n\n".join(
        "This is " + "\n".join(lines[n::-1]) + "\nthe house that Jack built." for n in range(len(lines))
    )


def thinking_rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Right rows with a thought, among them long ones that try case after case, and calls of tools."""
    answer = "There are **153** ways, by the recurrence f(n) = 4 f(n-2) - f(n-4)."
    yield made_row("thought-tiling", "thought-tiling", "ok", answer, "\n\n".join(THOUGHTS))
    for n, text in enumerate(PROSE):
        thought = f"The user asks about this. Facts I know: {text} I will keep it short and use the last part first."
        yield made_row(f"thought-prose-{n}", "thought-prose", "ok", text.split(". ")[-1], thought)
    trials = [
        f"n = {n}: {n}^2 + {n} + 41 = {n * n + n + 41}, "
        + rng.choice(["divisible by {}? no.", "that is prime, mod {} fine."]).format(n + 2)
        for n in range(1, 200)
    ]  # fmt: skip
    for count in (39, 199):
        thought = (
            "Let me simply try.\n" + "\n".join(trials[:count]) + "\nSo it fails first at n = 40, since 41 divides it."
        )
        yield made_row(
            f"thought-trials-{count}", "thought-trials", "ok", "It fails at n = 40: 40² + 40 + 41 = 41².", thought
        )
    search = "\n".join(
        f"Case a={a}, b={b}: then c = {100 - a - b}, and a²+b²+c² = {a * a + b * b + (100 - a - b) ** 2}. Too "
        + ("large." if a * a + b * b + (100 - a - b) ** 2 > 4000 else "small, skip.")
        for a, b in ((rng.randrange(50), rng.randrange(50)) for _ in range(70))
    )
    yield made_row("thought-search", "thought-search", "ok", "The smallest is a = 33, b = 33, c = 34.", search)
    yield made_row("thought-search-cut", "thought-search", "length", "", search, "length")
    facts = [
        f"{rng.choice(NAMES)} {rng.choice(['sold', 'lent', 'gave', 'returned', 'described'])} "
        f"{rng.choice(['a', 'the', 'her', 'one'])} "
        f"{rng.choice(['old', 'broken', 'blue', 'heavy', 'second', 'Dutch'])} {rng.choice(THINGS)} to "
        f"{rng.choice(NAMES)} in "
        f"{rng.choice(CITIES)} for {rng.randrange(2, 900)} {rng.choice(['crowns', 'francs', 'days', 'minutes'])}, "
        f"{rng.choice(['so', 'but', 'because', 'although', 'and'])} "
        f"{rng.choice(['nobody', 'the judge', 'she', 'the clerk'])} "
        f"{rng.choice(['had asked', 'noticed', 'wrote it down', 'knew the way', 'kept quiet'])}."
        for _ in range(450)
    ]
    yield made_row("thought-45kB", "thought-45kB", "ok", "Quinn has the lamp.", " ".join(facts))
    yield made_row("thought-45kB-cut", "thought-45kB", "length", "", " ".join(facts), "length")
    call = [{"id": "c1", "type": "function", "function": {"name": "area", "arguments": '{"base": 10, "height": 5}'}}]
    for n, content in enumerate(("", None, "I will compute that.")):
        yield made_row(f"call-{n}", "call", "ok", content, "The tool area fits.", "tool_calls", tool_calls=call)
        yield made_row(f"call-plain-{n}", "call", "ok", content, None, "stop", tool_calls=call)


def cut_rows() -> Iterator[dict[str, Any]]:
    """Cut by max_tokens, in the answer or within the thought (content is then "" behind a reasoning parser)."""
    for n, text in enumerate(PROSE):
        yield made_row(f"cut-answer-{n}", "cut-answer", "length", text[: 150 + 31 * n], None, "length")
        yield made_row(f"cut-thought-{n}", "cut-thought", "length", "", text[: 150 + 31 * n], "length")
    for name, text in TONGUES.items():
        yield made_row(f"cut-{name}", f"right-tongue-{name}", "length", text[:-7], None, "length")
    yield made_row("cut-emoji", "cut-emoji", "length", PROSE[0] + " \ufffd", None, "length")
    yield made_row("cut-null", "cut-thought", "length", None, PROSE[1], "length")
    yield made_row("cut-count", "right-count", "length", "\n".join(map(str, range(1, 900))), None, "length")
    yield made_row("cut-code", "right-code-0", "length", "```\n" + CODE[0][:-20], None, "length")
    yield made_row("cut-tagged", "cut-tagged", "length", "<think>\n" + PROSE[5], None, "length", thinking=True)


def aborted_rows() -> Iterator[dict[str, Any]]:
    """Ended by the server, not by the model: no end is announced, or one that no model makes."""
    for n, finish in enumerate(("abort", None, "error")):
        yield made_row(f"aborted-{n}", f"aborted-{n}", "abort", PROSE[n][:90], None, finish)
        yield made_row(f"aborted-empty-{n}", f"aborted-{n}", "abort", "", "", finish)
        yield made_row(f"aborted-thought-{n}", f"aborted-{n}", "abort", "", THOUGHTS[n], finish)


def empty_rows() -> Iterator[dict[str, Any]]:
    """Nothing there. The old failure was the first one: four tokens of an empty thought and two of the turn's end."""
    blanks = {
        "think": "<think>\n\n</think>\n\n", "null": None, "none": "", "newlines": "\n\n", "space": " ",
        "wide": "\u3000\u00a0", "zero-width": "\u200b\u200b\ufeff", "end-token": "<|im_end|>\n",
        "text-end": "<|endoftext|>", "tag": "<think>\n",
    }  # fmt: skip
    for name, content in blanks.items():
        for thinking in (True, False):
            yield made_row(f"empty-{name}-{thinking}", f"empty-{name}", "empty", content, thinking=thinking)
    for name in ("null", "none", "newlines"):
        yield made_row(f"empty-after-thought-{name}", "empty-after-thought", "empty", blanks[name], PROSE[0])
        yield made_row(f"empty-cut-{name}", "empty-cut", "empty", blanks[name], None, "length", thinking=True)
        yield made_row(f"empty-both-{name}", "empty-both", "empty", blanks[name], "\n\n")


def thoughtless_rows() -> Iterator[dict[str, Any]]:
    """A thought was asked for and is not there, or is a stub."""
    answers = [
        "Sure, here it is.",
        "I'm sorry, I can't.",
        "The answer is 42.",
        "Hello! How can I help?",
        *PROSE[:4],
        CODE[1],
    ]
    for n, answer in enumerate(answers):
        for m, thought in enumerate((None, "", "\n\n", "\n", "Okay.")):
            if (n + m) % 2 == 0:
                key, group, split = f"thoughtless-{n}-{m}", f"thoughtless-{n}", HALVES[n % 2]
                yield made_row(key, group, "no_thinking", answer, thought, thinking=True, split=split)
    yield made_row("thoughtless-not-asked", "thoughtless-not-asked", "ok", PROSE[0], None, thinking=None)


def unclosed_rows() -> Iterator[dict[str, Any]]:
    """The thought's end is missing, or the thought lies in the answer."""
    for n, (thought, answer) in enumerate(zip(THOUGHTS + PROSE, PROSE + THOUGHTS, strict=True)):
        thinking = n % 3 != 2
        texts = (f"<think>\n{thought}", f"{thought}\n</think>\n\n{answer}", f"<think>\n{thought}\n</think>\n\n{answer}")
        group, split = f"unclosed-{n}", HALVES[n % 2]
        yield made_row(group, group, "unclosed", texts[n % 3], None, thinking=thinking, split=split)
    yield made_row("unclosed-upper", "unclosed-upper", "unclosed", "Yes.\n</THINK>\nYes, it is.", PROSE[0])
    yield made_row("unclosed-twice", "unclosed-twice", "unclosed", f"</think>\n\n{PROSE[1]}", PROSE[0])
    for n, content in enumerate(("", None)):
        usage = {"prompt_tokens": 40, "completion_tokens": 170, "reasoning_tokens": 170}
        yield made_row(f"unclosed-all-thought-{n}", "unclosed-all-thought", "unclosed", content, PROSE[n], usage=usage)
    text = "In that model the reasoning stands between `<think>` and `</think>`, and the template removes it later."
    yield made_row("unclosed-about-tags", "unclosed-about-tags", "unclosed", text, PROSE[2], doubt=True)


def loop_rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """To the end the same again: word for word, with a counter, with a changing word, in the thought, in code, ..."""
    sentences = {
        "sentence": "I hope this helps you to understand the topic better. ",
        "wait": "Wait, let me check that again. 3 times 11 is 33, plus 6 is 39, plus 2 is 41. Yes, 41. ",
        "word": "very ",
        "phrase": "and so on, ",
        "two-words": "the of ",
        "chinese": "我们需要再检查一遍这个结果是否正确。",
        "short-chinese": "好的",
        "arabic": "دعني أتحقق من ذلك مرة أخرى. ",
        "japanese": "もう一度確認してみましょう。",
        "russian": "Проверим ещё раз это решение. ",
        "list-item": "- A healthy diet and regular exercise\n",
        "code-line": "    result.append(value)\n",
        "function": CODE[2] + "\n",
        "json": '  {"id": 1, "name": "John Doe", "email": "john@example.com"},\n',
        "row": "| John | 25 | New York |\n",
        "latex": "\\frac{d}{dx} x^2 = 2x \\\\\n",
        "paragraph": PROSE[2] + "\n\n",
        "thought-paragraph": THOUGHTS[1] + "\n\n",
        "digits": "142857",
        "emoji": "😀🎉 ",
        "tag": "<td></td>",
    }
    for n, (name, text) in enumerate(sentences.items()):
        repeated = text * (4 + 2400 // len(text))
        start = PROSE[n % len(PROSE)] + "\n\n"
        yield made_row(f"loop-{name}-cut", f"loop-{name}", "loop", start + repeated[:-2], None, "length")
        yield made_row(f"loop-{name}-thought", f"loop-{name}", "loop", "", start + repeated[:-1], "length")
        if n % 3 == 0:
            yield made_row(f"loop-{name}-stop", f"loop-{name}", "loop", start + repeated, None, "stop")
            yield made_row(f"loop-{name}-thought-stop", f"loop-{name}", "loop", PROSE[5], repeated, "stop")
            yield made_row(
                f"loop-{name}-45kB", f"loop-{name}", "loop", "", start + text * (45_000 // len(text)), "length"
            )
    counted = {
        "step": "Step {n}: Check the result of the previous step and make sure that it is right.\n",
        "item": "{n}. The importance of communication in a healthy relationship\n",
        "attempt": "Hmm, attempt {n}: that does not work either, because the sum is too large. Let me try another.\n\n",
        "test": "def test_case_{n}():\n    assert solve(input) == expected\n\n",
        "chinese": "第{n}步：继续检查上一步的结果，确保没有错误。\n",
        "year": "In {n}, the company was founded and became a leader in its field.\n",
    }
    for name, text in counted.items():
        repeated = "".join(text.format(n=n) for n in range(1, 5 + 3600 // len(text)))
        yield made_row(
            f"loop-counted-{name}", f"loop-counted-{name}", "loop", PROSE[0] + "\n" + repeated[:-1], None, "length"
        )
        yield made_row(f"loop-counted-{name}-thought", f"loop-counted-{name}", "loop", "", repeated[:-1], "length")
    for name, templates in {
        "names": ["{a} is a good person who likes to help others. "],
        "shuffled": [s + ". " for s in PROSE[1].replace("\n", " ").split(". ")],
        "doubts": ["Wait, is that right? ", "Let me check again. ", "Yes, that seems right. ",
                   "Hmm, but what about zero? ",
                   "No, zero is excluded. ", "So the answer is 153. ", "But let me double-check. "],
    }.items():  # fmt: skip
        text = "".join(rng.choice(templates).format(a=rng.choice(NAMES[:5])) for _ in range(8000 // len(templates[0])))
        yield made_row(f"loop-{name}", f"loop-{name}", "loop", "", text[:5000], "length")
        yield made_row(f"loop-{name}-answer", f"loop-{name}", "loop", PROSE[0] + text[:3000], None, "length")
    for period in (2, 3):
        long = "\n\n".join(PROSE[: 3 * period - 3])
        yield made_row(
            f"loop-long-{period}", f"loop-long-{period}", "loop", "", "\n\n".join([long] * 5)[:-40], "length"
        )
    noisy = list("I will now look at the next case in the same way as before. " * 60)
    for _ in range(len(noisy) // 60):
        noisy[rng.randrange(len(noisy))] = rng.choice("abcdefghij ")
    yield made_row("loop-noisy", "loop-noisy", "loop", "", "".join(noisy), "length")


def junk_rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """No language: one symbol over and over, replacement or control characters, broken bytes."""
    symbols = {"bang": "!", "dot": ".", "zero": "0", "star": "*", "question": "?", "a": "a", "dash": "-", "han": "的",
               "tilde": "~", "quote": '"', "space-bang": "! ", "line-bang": "!\n", "hash": "#",
               "emoji": "😀", "box": "█"}  # fmt: skip
    for n, (name, symbol) in enumerate(symbols.items()):
        group = f"junk-{name}"
        yield made_row(f"junk-{name}-cut", group, "junk", symbol * 1500, None, "length")
        yield made_row(f"junk-{name}-thought", group, "junk", "", symbol * 900, "length")
        if n % 2 == 0:
            yield made_row(f"junk-{name}-after", group, "junk", PROSE[n % 6] + " " + symbol * 600, None, "length")
            yield made_row(f"junk-{name}-stop", group, "junk", symbol * 300, None, "stop")
    for n, stub in enumerate(("!!!!", "!", "...", "?!?!", "。。。", "***", '"', "!!!!\n\n!!!!")):
        yield made_row(f"junk-stub-{n}", f"junk-stub-{n}", "junk", stub, None, "stop")
    blob = rng.randbytes(1200)
    bytes_text = blob.decode("utf-8", "replace")
    broken = "".join(c if rng.random() > 0.3 else "\ufffd" for c in PROSE[0])
    control = "".join(c if rng.random() > 0.3 else chr(rng.randrange(1, 9)) for c in PROSE[1])
    private = "".join(chr(0xE000 + rng.randrange(3000)) for _ in range(300))
    for name, text in {"bytes": bytes_text, "broken": broken, "control": control, "private": private,
                       "replacement": "\ufffd" * 200, "nul": "\0" * 100, "surrogate": "\ud83d" * 90,
                       "few": "The result is " + "\ufffd" * 6 + " " + "\ufffd" * 4 + "."}.items():  # fmt: skip
        yield made_row(f"junk-{name}", f"junk-{name}", "junk", text, None, "stop")
        yield made_row(f"junk-{name}-thought", f"junk-{name}", "junk", "", text, "length")


def salad_rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Pieces of words of all scripts, as broken weights or a wrong cache give; and English words in any order."""
    pieces = [text[at : at + rng.randrange(1, 6)] for text in TONGUES.values() for at in range(0, len(text), 4)]
    words = " ".join(PROSE).split()
    for n in range(6):
        yield made_row(
            f"salad-{n}", f"salad-{n}", "salad", "".join(rng.choice(pieces) for _ in range(60 + 60 * n)), None, "stop"
        )
        yield made_row(
            f"salad-words-{n}", f"salad-words-{n}", "salad", " ".join(rng.choices(words, k=80 + 60 * n)), None, "stop"
        )


if __name__ == "__main__":
    main()
