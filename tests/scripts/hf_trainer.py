import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(42)
torch.manual_seed(42)

EPOCHS = 2
VOCAB = 100
MAX_LEN = 12


class TextDataset(Dataset):
    def __init__(self, encodings, labels):
        self.encodings = encodings
        self.labels = labels

    def __getitem__(self, idx):
        item = {key: torch.tensor(val[idx]) for key, val in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item

    def __len__(self):
        return len(self.labels)


def fake_corpus(n, seed):
    """token 1 = [CLS], 0 = [PAD]; the label says whether 'good' words outnumber 'bad' ones"""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCAB, size=(n, MAX_LEN))
    lengths = rng.integers(5, MAX_LEN + 1, size=n)
    mask = (np.arange(MAX_LEN)[None, :] < lengths[:, None]).astype(int)
    ids[:, 0] = 1
    ids = ids * mask
    good = ((ids >= 3) & (ids < 50)).sum(1)
    bad = (ids >= 50).sum(1)
    labels = (good > bad).astype(int)
    return {"input_ids": ids.tolist(), "attention_mask": mask.tolist()}, labels.tolist()


train_dataset = TextDataset(*fake_corpus(960, seed=1))
eval_dataset = TextDataset(*fake_corpus(400, seed=2))

config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=MAX_LEN,
    num_labels=2,
)
model = BertForSequenceClassification(config)


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    preds = np.argmax(logits, axis=-1)
    return {"accuracy": round(float((preds == labels).mean()), 4)}


training_args = TrainingArguments(
    output_dir="results",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    learning_rate=3e-3,
    warmup_steps=40,
    weight_decay=0.01,
    logging_strategy="epoch",
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=42,
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    compute_metrics=compute_metrics,
)

trainer.train()
metrics = trainer.evaluate()
print(f"final eval loss {metrics['eval_loss']:.4f} accuracy {metrics['eval_accuracy']:.4f}")
trainer.save_model("tiny-bert")
