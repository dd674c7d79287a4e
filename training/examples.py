"""The example documents with their questions, as prompts for the reader."""

from pathlib import Path

from kvmosaic.lab.eval.text.documents import Document, Example, Question

FOLDER = Path(__file__).parents[1] / "examples" / "documents"
SYSTEM = "Answer the question from the documents."


def load_documents(folder: Path = FOLDER) -> list[Document]:
    """Every text file, in the order of the names; the title is the name without its ending."""
    return [Document(path.stem, path.read_text("utf-8").strip()) for path in sorted(folder.glob("*.txt"))]


def load_questions(folder: Path = FOLDER) -> list[Question]:
    """The pairs in questions.tsv, each with the one document that its question is about."""
    documents = load_documents(folder)
    questions = []
    for line in (folder / "questions.tsv").read_text("utf-8").splitlines():
        text, answer = line.split("\t")
        named = [index for index, document in enumerate(documents) if document.title and document.title in text]
        longest = max(named, key=lambda index: len(documents[index].title or ""))
        questions.append(Question(text, answer, longest))
    return questions


def example_with(count: int, first: int = 0) -> Example:
    """A prompt with `count` documents from the document `first` on, going round, and the questions about them."""
    documents, questions = load_documents(), load_questions()
    kept = [(first + offset) % len(documents) for offset in range(count)]
    asked = [Question(one.text, one.answer, kept.index(one.document)) for one in questions if one.document in kept]
    return Example(SYSTEM, tuple(documents[index] for index in kept), tuple(asked))
