"""The corpus: what is read, what is set apart, and what is taught as a chat."""

from pathlib import Path

from jdisagg.training.data import (
    END_OF_TEXT,
    SPECIALS,
    CorpusFiles,
    SourceFile,
    as_chat,
    is_held_out,
    lessons,
    make_tokenizer,
    read_corpus,
    token_stream,
)


def test_held_out_files_never_appear_in_training_data(corpus: CorpusFiles) -> None:
    assert corpus.held_out
    tokenizer = make_tokenizer((document.text for document in corpus.training), 320)
    stream = token_stream(corpus.training, tokenizer, lesson_share=1.0, seed=0)
    text = tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    for document in corpus.held_out:
        assert _mark(document) not in text
    for document in corpus.training:
        assert _mark(document) in text
    assert text.count(END_OF_TEXT) == 2 * len(corpus.training)  # each file, and its one function as a chat


def _mark(document: SourceFile) -> str:
    return f"mark-{1000 + int(document.name.split('module')[1].removesuffix('.py'))}-"


def test_the_split_depends_on_the_name_alone(library: Path, corpus: CorpusFiles, tmp_path: Path) -> None:
    for document in corpus.held_out + corpus.training:
        copy = tmp_path / document.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("entirely = 'other text'\n")
    again = read_corpus(tmp_path)
    assert [document.name for document in again.held_out] == [document.name for document in corpus.held_out]
    assert not {document.name for document in corpus.held_out} & {document.name for document in corpus.training}


def test_about_three_in_a_hundred_names_are_held_out() -> None:
    held_out = sum(is_held_out(f"package/module{number}.py") for number in range(10_000))
    assert 250 < held_out < 350
    assert is_held_out("socket.py") and not is_held_out("os.py")


def test_tests_and_other_encodings_are_left_out(corpus: CorpusFiles) -> None:
    names = {document.name for document in corpus.training + corpus.held_out}
    assert len(names) == 100
    assert "latin.py" not in names and "test/test_module.py" not in names


def test_a_lesson_asks_for_a_function_by_its_docstring_and_answers_unindented() -> None:
    source = '''class Stack:
    def push(self, item):
        """Put item on top.

        It must be hashable.
        """
        self.items.append(item)
        return len(self.items)

    def undocumented(self):
        return [item for item in self.items if item is not None and item != 0]
'''
    found = lessons(SourceFile("stack.py", source))
    assert [lesson.wish for lesson in found] == ["Write the function push: Put item on top."]
    assert found[0].answer.startswith('def push(self, item):\n    """Put item on top.')
    assert found[0].answer.endswith("    return len(self.items)\n")
    assert as_chat(found[0]).startswith("<|im_start|>user\nWrite the function push")


def test_sources_of_another_python_teach_no_lesson() -> None:
    assert lessons(SourceFile("old.py", "print 'hello'\n")) == []


def test_any_text_survives_the_tokenizer(corpus: CorpusFiles) -> None:
    tokenizer = make_tokenizer((document.text for document in corpus.training), 320)
    text = "déjà vu: 漢字 \U0001f600\ttabs\r\n  and\x00bytes"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(special) for special in SPECIALS] == [0, 1, 2, 3]
    assert tokenizer.encode(f"a{END_OF_TEXT}b").ids[1] == 0
