"""Names of the built-in networks. No torch is needed here, so that a slip costs nothing."""

NAMES = {
    "auto": "what the algorithm can use: cnn2 for grey images, cnn4 for colour, with batch norm (width=wide) where it is needed; mlp for rows of numbers, and for images whose sides are no multiples of 4",
    "cnn2": "two 3x3 convolutions with 2x2 pooling, a latent layer, a linear classifier (supplement, FMNIST column)",
    "cnn4": "four 3x3 convolutions with 2x2 pooling, a latent layer, a linear classifier (supplement, CIFAR column)",
    "cnn2bn": "the Fed-ZDA paper's: two convolutions with batch norm and pooling, and a linear classifier; two hidden layers for colour",
    "cnn2fc": "the SDA-FL paper's for grey images: two convolutions with pooling, a hidden layer, a linear classifier; widths of McMahan et al.",
    "cnn2fc-small": "cnn2fc at a smaller size: 16 and 32 channels, 128 hidden units",
    "digits6": "the FRAug paper's for digits: three 5x5 convolutions and two hidden layers with batch norm, a linear classifier",
    "features": "a feature map that needs no data, made from the seed, and a linear classifier, which alone is trained; model.features says which map",
    "hazards": "Cox's model for times to an event: a linear risk and a hazard for each time of the schema's grid; nothing else to choose",
    "mlp": "two hidden layers of 128 and 64 with batch norm, and a linear classifier, for inputs of any shape: tables above all",
    "resnet18": "the SDA-FL paper's for colour images: ResNet-18 with a 3x3 convolution in front, as usual for CIFAR; stem=imagenet: FRAug's",
}
"""With one line for people."""
