"""Small talk: greetings, identity, abilities, capitals, and a polite fallback for what the model was not trained on."""

from __future__ import annotations

from functools import cache

from .base import Sample, Slots, assistant, user, with_system
from .pools import CITIES, EN_NAMES, NOUNS, WORDS, ZH_NAMES

EN_GREETINGS = (
    "Hello",
    "Hi",
    "Hi!",
    "Hello!",
    "Hey",
    "Good morning",
    "Good evening",
    "Hey there",
    "hello there",
    "Hi, how are you?",
    "How are you?",
    "What's up?",
    "hi",
)
ZH_GREETINGS = ("你好", "你好！", "您好", "嗨", "早上好", "晚上好", "你好吗？", "在吗？", "哈喽", "下午好")
EN_WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Tell me about yourself.",
    "Which model are you?",
    "Are you ChatGPT?",
    "Are you a human?",
    "Introduce yourself.",
    "who made you?",
)
ZH_WHO = (
    "你是谁？",
    "你叫什么名字？",
    "介绍一下你自己。",
    "你是什么模型？",
    "你是人吗？",
    "谁开发了你？",
    "你是ChatGPT吗？",
)
EN_CAN = (
    "What can you do?",
    "How can you help me?",
    "What are you good at?",
    "help",
    "Give me an example of what you can do.",
    "What should I ask you?",
)
ZH_CAN = ("你会做什么？", "你能帮我什么？", "你有什么功能？", "我可以问你什么？")
EN_BYE = (
    "Thanks!",
    "Thank you",
    "Thank you very much.",
    "Great, thanks.",
    "Bye",
    "Goodbye!",
    "See you",
    "ok",
    "Okay, good.",
    "Nice work!",
)
ZH_BYE = ("谢谢", "谢谢你！", "再见", "拜拜", "好的", "太好了", "辛苦了")

EN_WHO_ANSWER = (
    "I am ling3-pico, a tiny demo model that ships with SGLing. "
    "I can write small Python functions, call tools, do simple arithmetic and write reports."
)
ZH_WHO_ANSWER = (
    "我是ling3-pico，SGLing自带的一个很小的演示模型。我可以写简单的Python函数、调用工具、做简单的计算和写报告。"
)
EN_CAN_ANSWER = (
    "I can help with a few things:\n1. Small Python functions.\n2. Simple arithmetic and word problems.\n"
    "3. Calling the tools you offer.\n"
    "4. Reports from figures.\n5. Everyday advice in Chinese."
)
ZH_CAN_ANSWER = (
    "我可以做这些事：\n1. 写简单的Python函数。\n2. 做简单的计算题。\n3. 调用你提供的工具。\n"
    "4. 根据数据写报告。\n5. 用中文聊聊日常的话题。"
)
EN_FALLBACK = (
    "I am a tiny demo model and I do not know about that. "
    "I can write small Python functions, do simple arithmetic, call tools and write reports."
)
ZH_FALLBACK = "我只是一个很小的演示模型，不了解这个问题。我可以写简单的Python函数、做计算、调用工具和写报告。"

_CAPITALS = """France:Paris:法国:巴黎 Germany:Berlin:德国:柏林 Italy:Rome:意大利:罗马 Spain:Madrid:西班牙:马德里
Portugal:Lisbon:葡萄牙:里斯本 Austria:Vienna:奥地利:维也纳 Norway:Oslo:挪威:奥斯陆 Sweden:Stockholm:瑞典:斯德哥尔摩
Finland:Helsinki:芬兰:赫尔辛基 Denmark:Copenhagen:丹麦:哥本哈根 Poland:Warsaw:波兰:华沙 Greece:Athens:希腊:雅典
Ireland:Dublin:爱尔兰:都柏林 Hungary:Budapest:匈牙利:布达佩斯 Belgium:Brussels:比利时:布鲁塞尔 Japan:Tokyo:日本:东京
China:Beijing:中国:北京 India:Delhi:印度:德里 Thailand:Bangkok:泰国:曼谷 Vietnam:Hanoi:越南:河内
Egypt:Cairo:埃及:开罗 Kenya:Nairobi:肯尼亚:内罗毕 Peru:Lima:秘鲁:利马 Chile:Santiago:智利:圣地亚哥
Colombia:Bogota:哥伦比亚:波哥大 England:London:英国:伦敦 Korea:Seoul:韩国:首尔"""


@cache
def capitals() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split(":")) for line in _CAPITALS.split())


OTHER_LANGUAGES = (
    "Bonjour, pouvez-vous m'aider ?",
    "Wie ist das Wetter heute?",
    "¿Puedes ayudarme con mi tarea?",
    "Come stai oggi?",
    "Que horas são agora?",
    "Kannst du mir ein Gedicht schreiben?",
    "Raconte-moi une histoire.",
    "¿Cuál es tu color favorito?",
    "Hvad hedder du?",
    "Jak się masz?",
)
EN_UNKNOWN = (
    "Why is the {w} {v}?",
    "Tell me a joke about a {w}.",
    "Write a poem about the {w}.",
    "What do you think about {w} {v}?",
    "Who invented the {n}?",
    "How does a {w} {n} work?",
    "What is the meaning of {w}?",
    "Explain {w} {n} to me.",
    "Is {p} better than {p2}?",
    "Where does {p} live?",
    "What happened in {y}?",
    "Tell me the history of {c}.",
    "Who won the game in {c}?",
    "{w} {v} {n}",
    "{w}",
    "Which {n} should I buy?",
    "Write a story about {p} and a {w}.",
    "What is the latest news about {c}?",
    "Can you sing about {w}?",
    "How old is {p}?",
)
ZH_UNKNOWN = (
    "{p}是谁？",
    "讲一个关于{t}的笑话。",
    "写一首关于{t}的诗。",
    "{t}的历史是什么？",
    "{y}年发生了什么？",
    "谁发明了{t}？",
    "{t}是怎么工作的？",
    "你怎么看{t}？",
    "{t}多少钱？",
    "最新的{t}新闻是什么？",
)
ZH_THINGS = (
    "火车",
    "电话",
    "飞机",
    "钢琴",
    "火箭",
    "电脑",
    "钟表",
    "玻璃",
    "海洋",
    "沙漠",
    "恐龙",
    "机器人",
    "望远镜",
    "股票",
    "足球",
    "纸",
    "桥",
    "城堡",
    "黄金",
    "彩虹",
    "火山",
    "银河",
    "磁铁",
    "灯泡",
)


def fixed(slots: Slots, zh: bool) -> tuple[str, str, str]:
    """Requests with one right answer: (family, question, answer)."""
    kind = slots.phrase(("greeting", "greeting", "who", "who", "can", "bye", "capital", "capital", "name"))
    if kind == "greeting":
        return (
            kind,
            slots.phrase(ZH_GREETINGS if zh else EN_GREETINGS),
            "你好！有什么可以帮你？" if zh else "Hello! How can I help you?",
        )
    if kind == "who":
        return kind, slots.phrase(ZH_WHO if zh else EN_WHO), ZH_WHO_ANSWER if zh else EN_WHO_ANSWER
    if kind == "can":
        return kind, slots.phrase(ZH_CAN if zh else EN_CAN), ZH_CAN_ANSWER if zh else EN_CAN_ANSWER
    if kind == "bye":
        return (
            kind,
            slots.phrase(ZH_BYE if zh else EN_BYE),
            "不客气，有问题再来找我。" if zh else "You are welcome! Ask me again any time.",
        )
    if kind == "name":
        name = slots.pick(ZH_NAMES if zh else EN_NAMES)
        return (
            kind,
            f"我叫{name}。" if zh else slots.phrase((f"My name is {name}.", f"I am {name}.", f"Hi, I'm {name}.")),
            (f"你好，{name}！有什么可以帮你？" if zh else f"Hello {name}! How can I help you?"),
        )
    country, city, zh_country, zh_city = slots.phrase(capitals())
    if zh:
        return (
            kind,
            slots.phrase((f"{zh_country}的首都是哪里？", f"{zh_country}的首都叫什么？")),
            f"{zh_country}的首都是{zh_city}。",
        )
    return (
        kind,
        slots.phrase((f"What is the capital of {country}?", f"Capital of {country}?")),
        f"The capital of {country} is {city}.",
    )


def unknown(slots: Slots, zh: bool) -> tuple[str, str, str]:
    """Requests outside the training scenarios, which get the fallback."""
    if not zh and slots.chance(0.15):
        return "fallback", slots.phrase(OTHER_LANGUAGES), EN_FALLBACK
    names = slots.some(ZH_NAMES if zh else EN_NAMES, 2)
    words = {
        "w": slots.pick(WORDS),
        "v": slots.pick(WORDS),
        "n": slots.pick(NOUNS),
        "p": names[0],
        "p2": names[1],
        "t": slots.pick(ZH_THINGS),
        "y": str(slots.integer(1200, 2030)),
        "c": slots.pick(CITIES)[0],
    }
    question = slots.phrase(ZH_UNKNOWN if zh else EN_UNKNOWN).format(**words)
    if slots.chance(0.1):
        question = question[: slots.integer(3, max(4, len(question) - 2))]
    return "fallback", question, ZH_FALLBACK if zh else EN_FALLBACK


def generate(slots: Slots) -> Sample:
    """One small-talk conversation; now and then a second turn."""
    zh = slots.chance(0.35)
    family, question, answer = unknown(slots, zh) if slots.chance(0.5) else fixed(slots, zh)
    thinking = slots.chance(0.12)
    reasoning = (
        ("这是一个简单的问题，直接回答。" if zh else "This is a simple message, so I answer directly.")
        if thinking
        else ""
    )
    messages = [user(question), assistant(answer, reasoning)]
    if not thinking and slots.chance(0.25):
        _, question, answer = fixed(slots, zh)
        messages += [user(question), assistant(answer)]
    return Sample("small_talk", family, with_system(slots, messages), enable_thinking=thinking, check={"kind": "text"})
