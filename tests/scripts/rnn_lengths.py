import random
import time

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

SEED = 1234
EPOCHS = 2
BATCH_SIZE = 64

random.seed(SEED)
torch.manual_seed(SEED)
torch.backends.cudnn.deterministic = True

device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

PAD_IDX = 0
VOCAB_SIZE = 30


class SequenceDataset(Dataset):
    """bracket-like sequences; positive if token 1 appears before token 2"""
    def __init__(self, n):
        self.samples = []
        for _ in range(n):
            length = random.randint(4, 14)
            seq = [random.randint(3, VOCAB_SIZE - 1) for _ in range(length)]
            i, j = random.sample(range(length), 2)
            seq[i], seq[j] = 1, 2
            self.samples.append((seq, int(i < j)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        seq, label = self.samples[idx]
        return torch.tensor(seq, dtype=torch.long), label


def collate_fn(batch):
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    padded = pad_sequence(seqs, batch_first=True, padding_value=PAD_IDX)
    return padded, lengths, torch.tensor(labels, dtype=torch.float)


class LSTMClassifier(nn.Module):
    def __init__(self, vocab_size, embedding_dim, hidden_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=PAD_IDX)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True)
        self.fc = nn.Linear(hidden_dim, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, text, text_lengths):
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, text_lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, cell) = self.lstm(packed)
        return self.fc(hidden[-1]).squeeze(1)


def binary_accuracy(preds, y):
    rounded = torch.round(torch.sigmoid(preds))
    return (rounded == y).float().mean()


train_data, valid_data = SequenceDataset(1600), SequenceDataset(320)
train_loader = DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate_fn)
valid_loader = DataLoader(valid_data, batch_size=BATCH_SIZE, collate_fn=collate_fn)

model = LSTMClassifier(VOCAB_SIZE, 12, 16).to(device)
print(f'The model has {sum(p.numel() for p in model.parameters() if p.requires_grad):,} trainable parameters')

optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.BCEWithLogitsLoss().to(device)


def train(model, iterator):
    epoch_loss, epoch_acc = 0, 0
    model.train()
    for text, lengths, labels in iterator:
        text, labels = text.to(device), labels.to(device)
        optimizer.zero_grad()
        predictions = model(text, lengths)
        loss = criterion(predictions, labels)
        acc = binary_accuracy(predictions, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        epoch_loss += loss.item()
        epoch_acc += acc.item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def evaluate(model, iterator):
    epoch_loss, epoch_acc = 0, 0
    model.eval()
    with torch.no_grad():
        for text, lengths, labels in iterator:
            text, labels = text.to(device), labels.to(device)
            predictions = model(text, lengths)
            epoch_loss += criterion(predictions, labels).item()
            epoch_acc += binary_accuracy(predictions, labels).item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


for epoch in range(EPOCHS):
    start_time = time.time()
    train_loss, train_acc = train(model, train_loader)
    valid_loss, valid_acc = evaluate(model, valid_loader)
    print(f'Epoch: {epoch+1:02} | Epoch Time: {time.time() - start_time:.2f}s')
    print(f'\tTrain Loss: {train_loss:.4f} | Train Acc: {train_acc*100:.2f}%')
    print(f'\t Val. Loss: {valid_loss:.4f} |  Val. Acc: {valid_acc*100:.2f}%')
