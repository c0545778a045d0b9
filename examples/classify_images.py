"""An image classifier with AMP, DataLoader workers and CUDA events, as people write it for CUDA.

ditorch run examples/classify_images.py --steps 5
"""

import argparse
import random

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--gpu", type=int, default=0)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()

random.seed(0)
torch.manual_seed(0)
torch.cuda.manual_seed(0)
cudnn.benchmark = True
cudnn.deterministic = False


class Stripes(Dataset):
    """Images whose stripes run one of four ways: a stand-in for a data set on disk."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 4
        axis = torch.arange(16.0)
        image = [axis[None] + 0 * axis[:, None], axis[:, None] + 0 * axis[None], axis[None] + axis[:, None]]
        image.append(axis[None] - axis[:, None])
        pattern = torch.sin(image[label] * 1.5)
        return pattern.expand(3, 16, 16) + 0.1 * torch.randn(3, 16, 16, generator=generator), label


def main():
    if not torch.cuda.is_available():
        raise SystemExit("this script needs a GPU")
    torch.cuda.set_device(args.gpu)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, 4),
    ).cuda(args.gpu)
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = GradScaler()
    loader = DataLoader(
        Stripes(32 * args.steps), batch_size=32, shuffle=True, num_workers=args.workers, pin_memory=True
    )
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    model.train()
    correct = 0
    for images, target in loader:
        assert images.is_pinned()
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        start.record()
        with autocast():
            output = model(images)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        end.record()
        torch.cuda.synchronize()
        assert output.dtype == torch.float16
        assert output.is_cuda
        correct = (output.argmax(1) == target).float().mean().item()
        print(f"loss {loss.item():.3f} accuracy {correct:.2f} {start.elapsed_time(end):.1f} ms")
    print(f"scale {scaler.get_scale():.0f}, memory {torch.cuda.memory_allocated() >> 10} kB")


if __name__ == "__main__":
    main()
