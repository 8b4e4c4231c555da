"""Keywords of `fedfill.run` and the like, for editors and type checkers; written by ``python tools/options.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from fedfill.algorithms import Algorithm


class Shared(TypedDict, total=False):
    """What all runs of a comparison may be given: fields of `Experiment`, and settings."""

    data_dir: str | Path | None
    """Folder with data sets as Parquet, images or CSV."""
    data_fraction: float
    """Share of the training set that is used, the same of each class and of each domain."""
    domain_fractions: str | None
    """Shares of single domains in place of `data_fraction`, such as svhn=0.2,mnist_m=0.14."""
    image_size: int | None
    """Every image is brought to this many pixels on each side, in grey where all are grey."""
    schema_file: str | Path | None
    """What the columns of a table hold, as sites agreed on it: a TOML file, of which 'fedfill describe' makes ..."""
    clients: int | None
    """Number of clients (K)."""
    test_fraction: float | None
    """Share of the samples that is held out as everyone's test set where the data bring none."""
    client_test: float
    """Share of each client's samples that is kept as its own test split."""
    client_validation: float | None
    """Share of each client's other samples that is kept as its validation split."""
    labelled_per_client: int | None
    """How many of each client's training samples keep their labels."""
    extra: str | Path | None
    """File of 'fedfill synthesise', whose samples each client has beside its own labelled ones."""
    participation: float
    """Share of the clients that take part in a round."""
    rounds: int
    """Number of rounds (T)."""
    evaluate_every: int | None
    """Rounds from one evaluation to the next."""
    start_from: str | Path | None
    """Folder of a finished run with one global model, whose final weights are the first ones here."""
    engine: str
    """What runs the clients and carries their messages: see 'fedfill list engines'."""
    device: str
    """Where data and models lie: cpu, cuda, cuda:N, or auto for a GPU when there is one."""
    workers: int | None
    """How many clients are trained at the same time, in threads or, with `engine` ray, in processes."""
    stack: int | None
    """With `engine` local: how many clients' local trainings run as one program, which changes results by ..."""
    precision: Literal["float32", "bfloat16"]
    """What the network computes in where it is trained."""
    ray_address: str | None
    """With `engine` ray: a running cluster to join, such as auto or HOST:6379."""
    gpus_per_worker: float
    """With `engine` ray: share of a GPU for each worker."""
    min_replies: int
    """Good replies that a call to a whole cohort needs."""
    reply_timeout: float | None
    """Seconds that a client has for a reply."""
    delta: float
    """Delta of the privacy account, at which it gives epsilon."""
    preset: Literal["paper"] | None
    """Training budget: with paper, that of the algorithm's own paper."""
    local_epochs: int
    """Passes of a client over its data in a round (E); given alone, in place of an algorithm's `local_steps`."""
    local_steps: int | None
    """Mini-batches in a round, in place of epochs."""
    batch_size: int
    """Samples in a mini-batch (B)."""
    optimizer: Literal["adam", "adamw", "sgd"]
    """Of the local training, fresh in each round."""
    learning_rate: float
    """Step size of the local training."""
    momentum: float
    """Of the optimizer sgd."""
    weight_decay: float
    """L2 penalty of the local training."""
    lr_decay: float
    """Factor of the learning rate every `lr_decay_every` rounds; 1 keeps it constant."""
    lr_decay_every: int
    """Rounds between two decays of the learning rate."""
    buffers: Literal["average", "frozen"]
    """Running statistics of normalisation layers: learnt and averaged like parameters (average), or left as ..."""
    augmentation: Literal["shift", "shift_flip", "crop", "crop_colour"] | None
    """How the images of each mini-batch are changed before it is trained on: moved (shift), moved and half of ..."""
    trust: Literal["site", "secure", "server"]
    """Who adds the noise of target_epsilon: each client all of it, so that nobody has to be trusted (site), ..."""
    target_epsilon: float | None
    """Epsilon of all sums together for one record that is added or removed; none: no noise and no guarantee."""
    target_delta: float
    """Delta of target_epsilon."""
    honest: int | None
    """With trust=secure: how many clients at least add their share and keep it to themselves; none: two thirds ..."""
    share_one: float
    """Share of the squared privacy budget for the counts of single columns."""
    share_select: float
    """Share for the choice of pairs, where there is one."""
    rows: int | None
    """Synthetic rows that the network is trained on; none: as many as the noisy counts say there are."""
    classifier_epochs: int
    """Passes over these rows, with batch_size, optimizer and learning_rate."""
    turns: int
    """Tables that are counted one after the other, at the most; the rest of the budget is for them, at first ..."""
    degree: int
    """Columns of the largest tables that may be counted."""
    largest_model: float
    """Megabytes of the tables of the whole model; a turn has the share of them that is its share of the budget ..."""
    filter_steps: int | None
    """Exchanges in which the filters of patches are learned from all clients' images (spherical k-means), ..."""
    centre: Literal["seeded", "federated", "mean", "prior", "wrong"] | None
    """Centre of the features: the mean over seeded inputs (seeded), or over all clients' records, with noise ..."""
    releases: int
    """Among how many heads target_epsilon is divided; with head_every as many as there will be."""
    samples: Literal["inf"] | int
    """Draws for each class (M); inf: none, and the least upper bound of the loss on endless draws in their ..."""
    prior: Literal["uniform", "train"]
    """Whether classes count alike (uniform) or as in the clients' records together (train)."""
    head: str | Algorithm | None
    """What fits the last layer anew from sums over all clients, with its settings, such as fed3r or ccvr; ..."""
    head_every: int | None
    """Rounds from one new head to the next, the last round always; none: after the last round alone."""
    head_mode: Literal["beside", "replace"]
    """Whether a new head is evaluated and kept beside the trained one (beside), or training goes on from it ..."""
    local: str | Algorithm | None
    """Local objective of another algorithm with its settings, such as fedprox:mu=0.01; none: this one's own."""
    aggregation: str | Algorithm | None
    """Aggregation of another algorithm with its settings, such as qffl:q=1; none: this one's own."""
    weighting: Literal["samples", "uniform"]
    """Weights of the average: each client's number of samples, or all equal."""
    when: Literal["still", "once"]
    """How clients are divided: a cluster in two, whenever its model stands still and its clients pull at it ..."""
    warm_rounds: int
    """Rounds of plain FedAvg before any division."""
    still: float
    """Below which share of the longest update the mean update's length says that the model stands still."""
    eps1: float | None
    """The paper's own: the length below which a mean update says so, in the place of `still`; none: `still`."""
    eps2: float | None
    """The paper's own: the length above which the longest update says that clients pull at the model; none: any."""
    gamma: float
    """How far apart two halves must be: sqrt((1 - largest cosine across) / 2) above it."""
    linkage: Literal["complete", "single", "average"]
    """How alike two groups are: as their members that are least alike (complete, as in the authors' program), ..."""
    clusters: int | None
    """How many clusters there may be, or with once how many there are; none: any number, or with once where ..."""
    strata: Literal["none", "site"]
    """Whether each site has a baseline hazard of its own, and sends no sums over risk sets (site)."""
    fewest: int
    """Rows at risk that a site must have at each time of the grid at which it has any, or nothing is sent."""
    most_steps: int
    """Coefficients that are tried at the most."""
    band_level: float
    """Confidence of limits and bands."""
    ditto_lambda: float
    """How close a client's model is held to the global one (lambda); 0: each client alone."""
    clip: float | None
    """Largest l2 norm of a client's update (S), running statistics of batch norm included."""
    noise_multiplier: float
    """Standard deviation of the noise on the sum of the updates, as a multiple of `clip` (z)."""
    client_delta: float
    """Delta at which each round's record gives epsilon."""
    images_per_class: int
    """Synthetic images of each class that the classifier is trained on."""
    embedding: str
    """What is averaged over images: words of a map of features, of conv, project, fourier, relu, unit and clip."""
    embedding_seed: int
    """Of the map, which is the same for everybody and public."""
    generator_steps: int
    """Steps of the generator's training, at the server."""
    generator_batch: int
    """Images of each class in a step."""
    generator_learning_rate: float
    """Adam's for the generator, in the first of its stages of 250 steps; each has 0.7 times the one before."""
    generator_latent: int
    """Size of the generator's noise."""
    generator_width: int
    """Channels of the generator's widest images."""
    moments: Literal["first", "second"]
    """What the generator comes near to: the mean features of a class, or their mean second moments (z z') as well."""
    estimator: Literal["biased", "unbiased"]
    """Of the distance of means: the paper's, or one without the bias of a batch's own spread (unbiased)."""
    ridge_lambda: Literal["gcv", "evidence", "loo", "holdout"] | float
    """Ridge penalty: chosen by generalised cross-validation (gcv) or by the evidence (evidence), both from the ..."""
    column_norm: bool
    """Whether each class's weights are scaled to length 1, a heuristic against uneven classes."""
    scale: Literal["auto", "paper", "code"] | float
    """What the head is multiplied by, which changes no prediction: its softmax shall be as sharp as it is ..."""
    server_rate: float
    """Step size of the server (eta): about how far a parameter moves in a round."""
    beta1: float
    """How much of the mean movement's average is kept."""
    tau: float
    """What is added to the root of the squares' average: movements far below it are not made larger."""
    beta2: float
    """How much of the squares' average is kept."""
    personal_epochs: int | None
    """Epochs of the fine-tuning; 0: none, and clients are judged by the global model."""
    personal_part: Literal["all", "head"]
    """What is fine-tuned: the whole copy, or its head alone."""
    norm_shared: Literal["nothing", "affine"]
    """What of the normalisation layers is shared: nothing, or scales and shifts, so that running statistics ..."""
    covariance: Literal["shared", "class", "diagonal", "none", "full", "diag", "spherical"] | None
    """Covariance of the classes: one for all (shared), one for each (class), variances for each (diagonal: ..."""
    shrinkage: Literal["oas"] | float
    """Share of a multiple of the identity in the shared covariance, by the oracle approximating rule (oas) or ..."""
    curv_lambda: float
    """Weight of the others' penalties (lambda); 0: FedAvg, and nothing more is sent."""
    aggregate: Literal["kd", "ens"]
    """What makes the images: one decoder that learns from all clients' (kd), or the clients' own (ens)."""
    latent: int | None
    """Coordinates of the latent code."""
    beta: float
    """Weight of the divergence beside the reconstruction."""
    truncation: float
    """Latent codes are drawn from a standard normal on the condition that each coordinate is within this range."""
    balanced: bool
    """Whether clients' decoders are asked for all classes alike, in place of as they are in the records."""
    average_start: bool
    """With kd, whether the server's decoder starts from the mean of the clients' decoders, or from where these ..."""
    decoder_samples: int
    """With kd, images of the clients' decoders from which the server's learns."""
    decoder_epochs: int
    """With kd, passes over them."""
    decoder_learning_rate: float
    """With kd, of Adam on the server's decoder."""
    classifier_samples: int
    """Synthetic images on which the classifier is trained."""
    noise: Literal["none", "dpsgd", "paper_eq3", "absolute", "sensitivity"]
    """Noise on the gradients of the clients' conditional VAEs: none, or dpsgd, clipped per image and accounted."""
    vae_weight: float
    """Weight of divergence and reconstruction loss beside the cross-entropy (lambda)."""
    reconstruction: Literal["mse", "mse_sum", "bce_sum"]
    """Reconstruction loss: squared error averaged over pixels (the paper), summed, or binary cross-entropy summed."""
    reconstruction_weight: float
    """Factor of the reconstruction loss beside the divergence; both are multiplied by vae_weight."""
    kl: Literal["sum", "mean"]
    """Divergence summed or averaged over the latent's coordinates."""
    knowledge_round: int | None
    """Rounds before the exchange of codes; none: 40 % of all rounds."""
    spread: float
    """Standard deviation of the noise around a merged code, in each coordinate."""
    dc_alpha: float
    """Weight of the penalty on the drift (alpha)."""
    band: float
    """Which frequencies are low, as a share of the images' shorter side (L)."""
    bank_size: int
    """Images of each client whose amplitudes are shared, at the most."""
    mix: float
    """Largest share of the foreign amplitude in a mixed one; 0: images stay as they are."""
    episode: bool
    """Whether the loss on the changed images is taken after a step on the others."""
    inner_rate: float
    """With episode=true: size of that step (beta)."""
    gan_iterations: int
    """Steps of the generator in the pre-training, each after `gan_critic_steps` of the critic."""
    gan_chunk: int
    """Steps of each client's GAN between two averages, which are checkpoints as well."""
    gan_batch_size: int
    """Real images in a step of the critic; where these steps are noisy, the expected number."""
    gan_critic_steps: int
    """Steps of the critic for each of the generator."""
    gan_learning_rate: float
    """Of Adam, for generator and critic."""
    gan_penalty: float
    """Weight of the gradient penalty (gamma)."""
    gan_latent: int
    """Size of the generator's noise."""
    gan_width: int
    """Channels of the widest layers of generator and critic; the others have two and four times as many."""
    gan_average: float
    """Decay of a moving average of the generator that makes the images; 0: the generator itself does."""
    gan_weighting: Literal["uniform", "samples"]
    """Weights of these averages: all equal, as a client with more images would have more to hide."""
    n_classes: Literal["auto"] | int
    """Abundant and scarce classes that a client names (n); auto: the least number of classes that any client ..."""
    alpha: Literal["auto"] | int
    """Codes for each shared class (the quota); auto: as many as make n classes a tenth of the mean local data set."""
    want: Literal["rarest", "missing"]
    """What a client lacks: its n rarest classes (rarest), or all of which it has fewer than alpha records ..."""
    only_scarce: bool
    """Whether a recipient keeps only the classes that it asked for."""
    n_assistants: Literal["cover"] | int
    """Assisting clients for each recipient, chosen greedily to cover its scarce classes; cover: as many as ..."""
    means: Literal["local", "global"]
    """Whose records a shared mean is of: one assisting client's (local, the paper), or all clients' together, ..."""
    sigma: float
    """Standard deviation of the noise on each coordinate of a code; with noise=sensitivity a multiple of the ..."""
    latent_bound: Literal["sigmoid", "clip", "none", "auto"]
    """How codes are bounded before the mean: to [0, 1] (sigmoid), by clipping their norm (clip), or not at all ..."""
    latent_clip: float | None
    """Norm to which latent_bound=clip clips a code; none: half the root of the latent's size, as far as a ..."""
    mechanism: Literal["paper", "public_filter", "single_release", "prior", "none"]
    """What is shared: filtered noisy copies (paper), all judged by the public global model (public_filter), ..."""
    keep: Literal["recognised", "all", "norm", "head", "norm_head"] | None
    """Which codes are kept: those whose image the judge recognises (recognised, the paper's equation 2), or ..."""
    release_sigma: float
    """Noise on the one mean of single_release, at most sigma; recipients add the rest."""
    max_candidates: int | None
    """Draws for each class at the most, and exactly with public_filter; none: 200 times alpha."""
    preliminary_rounds: int | None
    """Rounds of preliminary training (T_p); none: 40 % of all rounds, the paper's best."""
    decoder_sync: Literal["last", "every"]
    """Average the decoders once, after the last preliminary round (the paper), or in every preliminary round."""
    secondary_latent: Literal["sample", "mean"]
    """What the classifier is trained on in the secondary phase: drawn codes, or the latent means that it sees ..."""
    encoder: Literal["local", "global"]
    """Which encoder the shared means come from: the client's own after training (the paper), or the one it ..."""
    share_at: Literal["first_secondary", "preliminary_end"]
    """When clients share: after training in their first secondary round (the paper), or at the end of ..."""
    dyn_alpha: float
    """Weight of the dynamic regulariser (alpha)."""
    frequencies: float | None
    """Share of the lowest frequencies, along each side of an image, that are kept; none: 5/7, and half of them ..."""
    radius: float | None
    """Length to which an image is shortened before it is summed, in shares of a white image's; none: 1 without ..."""
    latent_weight: float
    """Weight of the generator's latents in the local loss, in the first round (alpha); 0: FedAvg, and there is ..."""
    latent_decay: float
    """Factor of this weight in each round."""
    latent_labels: Literal["shares", "uniform"]
    """How often the generator is asked for each class: as often as it is among all samples (p(y)), or all ..."""
    latent_noise: Literal["normal", "uniform"]
    """Distribution of the generator's noise: N(0, 1), or uniform in 0..1 as in the authors' program."""
    ensemble: Literal["losses", "scores"]
    """What the generator minimises: the mean of the heads' losses, each head's by its share of the class (the ..."""
    diversity: float
    """Weight of the loss that keeps latents of different noise apart (eta)."""
    generator_weight_decay: float
    """L2 penalty of the generator."""
    missing: Literal["mask", "one"]
    """A class of which a client has no sample: it has no part in the loss (mask), or counts as one sample (one)."""
    own_start: bool
    """Whether a client's training in the first round starts from weights that it draws itself, as the papers' ..."""
    prior_variance: float | None
    """Variance of the global numbers about 0, in those of a client's about the global ones (sigma_0^2 / ..."""
    sweeps: int
    """How often each client is matched again with the others, at the most."""
    retrain_epochs: int | None
    """Passes over the data after each matched layer, with the layers up to it fixed; none: as in the first ..."""
    group_size: int
    """Samples behind a mean, at the least (M_k); 1 shares the samples themselves."""
    first_order: bool
    """Whether the term of first order, which has no lower bound, is trained on; false leaves it out, which is ..."""
    floor: bool
    """Whether no sample's loss may fall below zero, which mixup's can't either; ours, not the paper's."""
    temperature: float
    """Temperature of both softmaxes (tau)."""
    personal_layers: int
    """How many layers stay with the client (K_P): the part classifier counts as one, the others are the last ..."""
    components: int
    """Gaussians of each class at each client (K); one with a target_epsilon, which is of all clients' records ..."""
    classifier: Literal["softmax", "ridge", "lda"]
    """What is fitted to the draws as the last layer: softmax regression (softmax), ridge regression on one-hot ..."""
    head_steps: int
    """Mini-batches of 256 draws on which the last layer is trained, with classifier=softmax."""
    proto_weight: float
    """Weight of the distance to the prototypes (lambda); 0: each client alone."""
    proto_distance: Literal["mean", "squared"]
    """The mean of the squared differences over coordinates, for which the authors chose lambda, or their sum ..."""
    predict: Literal["prototypes", "classifier"]
    """How a client's model decides: by the nearest global prototype, or by its own classifier."""
    mu: float
    """Weight of the proximal term."""
    head_epochs: int
    """Epochs on the head in a round, before the local epochs, which are the representation's."""
    judged: Literal["personal", "generic"]
    """Whether clients are judged by both heads together, or by the generic one alone, which is the same model ..."""
    rs_alpha: float
    """Scale of the scores of missing classes (alpha); 1: FedAvg."""
    missing_below: int
    """A class counts as missing at a client with fewer samples of it than this."""
    rho: float
    """How far away the gradient is taken; 0: FedAvg."""
    adaptive: bool
    """Whether distances are measured in each parameter's own size (FedASAM)."""
    asam_eta: float
    """With adaptive=true: what is added to each parameter's size."""
    start_round: int | None
    """Rounds of plain training before the first synthetic image; none: 80 % of all rounds (section 4.6)."""
    inversion_steps: int
    """Steps of Adam on the pixels."""
    inversion_rate: float
    """Step size of Adam on the pixels."""
    statistic: Literal["std", "var"]
    """Whether deviations or variances of the layers' inputs are matched; the paper has both words."""
    statistics_weight: float
    """Weight of the distance between statistics."""
    class_weight: float
    """Weight of the cross-entropy in the inversion."""
    tv_weight: float
    """Weight of the total variation in the inversion."""
    l2_weight: float
    """Weight of the mean squared pixel in the inversion."""
    jitter: int
    """Pixels by which images are rolled at random before each step of the inversion."""
    clamp: bool | None
    """Whether pixels are kept in the range of real images while they are made; none: where images are bytes, ..."""
    server_epochs: int
    """Epochs of the server on synthetic images."""
    server_batch_size: int
    """Samples in a mini-batch of the server."""
    server_buffers: Literal["average", "frozen"]
    """Whether running statistics follow the synthetic images at the server (average), or stay (frozen); with ..."""
    augmented_classes: Literal["all", "missing"]
    """Classes of the synthetic images: all (algorithm 2), or those of which the client has fewer than `few` ..."""
    few: int
    """Samples below which a class counts as missing."""
    generate_at: Literal["client", "server_broadcast"]
    """Who inverts the global model: each client for itself, or the server once for all of them."""
    reuse_rounds: int
    """Rounds for which a client goes on with the images that it made before."""
    server_step: Literal["none", "zdas"]
    """Whether the server then does what Fed-ZDAS's does."""
    unlabelled_batch_size: int
    """Samples without a label in a mini-batch."""
    unlabelled_weight: float
    """Weight of the loss on samples without a label (lambda_u); 0 leaves them out."""
    flip: bool | None
    """Whether augmentation flips images; none: where they are in colour."""
    embedding_latent: int | None
    """Size of the generator's noise and of the transformation's hidden layer (l); none: half an embedding's."""
    generator_weight: float
    """Weight of the generator's distance from real embeddings (lambda_G of equation 5)."""
    rtnet_weight: float
    """Weight of the transformation's closeness to real embeddings (lambda_R of equation 6)."""
    generator_distance: Literal["mmd", "mmd_per_class", "mean_cov", "l2"]
    """What the generator maximises: mmd, mmd_per_class, mean_cov, or l2 (to the prototypes), which has no ..."""
    rtnet_distance: Literal["mmd", "mmd_per_class", "mean_cov", "l2"]
    """What the transformation minimises."""
    prototype_momentum: float
    """Share of a mini-batch's class means in the prototypes (m)."""
    on_real: bool
    """Whether the head is trained on real embeddings with residuals."""
    on_prototypes: bool
    """Whether the head is trained on class prototypes with residuals."""
    personalised: bool
    """Whether residuals go through the client's transformation; if not, the generator's embeddings are used as ..."""
    generator_rate: float | None
    """Step size of the generator, in all rounds; none: that of the model."""
    rtnet_rate: float | None
    """Step size of the transformation network, in all rounds; none: that of the model."""
    residual_schedule: Literal["exponential", "constant"]
    """Weight of the residuals: exp(gamma (t - T)), or always 1."""
    residual_gamma: float | None
    """Gamma of the residuals' exponential schedule; none: 0.01."""
    synthetic_gamma: float
    """Gamma of the schedule of the synthetic embeddings' weight in the loss."""
    synthetic_limit: float
    """Largest weight of the synthetic embeddings in the loss; 0: none of them is used."""
    generator_norm: Literal["shared", "local"]
    """Whether the generator's batch norm is averaged, or stays with the clients."""
    generator_every: int
    """Mini-batches for each step of generator and transformation."""
    group: str | None
    """Column by whose values rows are told apart, or site: by client; none: one curve."""
    mix_alpha: float
    """Mixing shares come from Beta(mix_alpha, mix_alpha): a small one leaves most styles nearly as they are, ..."""
    mix_probability: float
    """In which share of the mini-batches styles are mixed; 0: in none."""
    mix_stages: int
    """Behind how many of the network's first stages; a stage ends with a pooling layer, or is a residual block."""
    mixup_alpha: float
    """Mixing shares come from Beta(alpha, alpha); 0: samples as they are."""
    own_share: float
    """Share of the own gradient in a step (beta); 1: FedSAM."""
    contrast: Literal["projection", "latent", "logits"]
    """What is contrasted: the output of a projection head in front of the classifier (the paper), the latent ..."""
    structure: Literal["star", "tree", "label_tree", "augmented"]
    """What is counted together: the label with each column (star), the tree of pairs that depend most (tree), ..."""
    strategy: Literal["fixed", "adaptive"]
    """Which layers are loaded: all but those of `keep`, or those that each client learns to load (section 3.3)."""
    policy_batches: int
    """With strategy=adaptive: mini-batches on which the policy is trained before each local training."""
    policy_rate: float
    """With strategy=adaptive: step size of the policy's Adam."""
    policy_temperature: float
    """With strategy=adaptive: temperature of the Gumbel-softmax."""
    order: Literal["first", "hessian_free", "exact"]
    """Second derivatives: left out (first), by a difference of gradients (hessian_free), or exact."""
    hessian_step: float
    """With order=hessian_free: how far apart these gradients are (delta)."""
    inner_share: float
    """Share of each mini-batch that the inner step is taken on; the rest is for the outer one."""
    adaptation_steps: int
    """Steps of size inner_rate that a client takes to its own model; 0: it is judged by the global one."""
    nearness: float
    """How close a client's head stays to the shared one: lambda_i as a multiple of its number of records."""
    pfedme_lambda: float
    """How close a client's model is held to the one that it shares (lambda)."""
    personal_steps: int
    """Steps towards the client's own model on each mini-batch (K)."""
    personal_rate: float
    """Size of these steps."""
    server_mix: float
    """How far the server goes towards the average (beta)."""
    q: float
    """How much fairness weighs; 0 is the plain mean of the clients."""
    images_per_client: int
    """Synthetic images that each client uploads, once."""
    real_weight: float
    """Weight of the real images' own loss beside that of the mixtures (lambda_2 of equation 8)."""
    server_steps: int
    """Mini-batches of synthetic images that the server trains on after each average."""
    relabel_rounds: int | None
    """Rounds after which labels stay as they are; none: they never do (figure 4b)."""
    server_learning_rate: float
    """Step size of the server along the clients' pseudo-gradient."""
    server_momentum: float
    """Momentum of this step."""
    penalty: float
    """Ridge penalty for each record, without noise."""
    gram_share: float
    """Share of the privacy budget for the features' second moments; the steps have equal parts of the rest."""
    rough: float
    """What is added to noisy second moments, in multiples of the largest eigenvalue of their noise."""
    steps: int | None
    """Steps among which the budget is divided; none: as many as there are rounds."""
    width: Literal["paper", "wide"]
    """The paper's tables, or the widths that the authors' program uses (PReLU, batch norm, dropout)."""
    latent_activation: Literal["sigmoid", "relu", "none"]
    """Activation of the latent layer; FedDPMS's paper puts a sigmoid into every network."""
    dropout: float | None
    """Dropout of the wide networks; none: 0.2 for colour, 0 for grey, as in the authors' program."""
    projection: int | None
    """Size of a projection head between latent layer and classifier (MOON's network); none: no head, or 256 ..."""
    stem: Literal["small", "imagenet"] | None
    """Front of resnet18: a 3x3 convolution, for small images (none does the same), or ImageNet's for those of ..."""
    features: str | None
    """Map of the network features: steps from left to right, of conv(F), patches(F), scatter, project(d), ..."""
    features_seed: int | None
    """Seed of the map of the network features; none: the experiment's."""
    frozen: Literal["encoder", "classifier"] | None
    """Part of the network that is not trained; none: all of it is, but a map of features."""
    last_layer: Literal["linear", "gaussian", "diagonal"] | None
    """Last layer of the network features: linear (none does the same), or a Gaussian for each class with a ..."""
    weights: str | Path | None
    """File with the weights to begin with, .safetensors or a state dict as .pt or .pth, by our names or ..."""


class Options(Shared, total=False):
    """What one run may be given."""

    seed: int
    """Seed of everything that is drawn at random."""


class Changes(TypedDict, total=False):
    """What may be changed at a resume."""

    schema_file: str | Path | None
    """What the columns of a table hold, as sites agreed on it: a TOML file, of which 'fedfill describe' makes ..."""
    extra: str | Path | None
    """File of 'fedfill synthesise', whose samples each client has beside its own labelled ones."""
    start_from: str | Path | None
    """Folder of a finished run with one global model, whose final weights are the first ones here."""
    stack: int | None
    """With `engine` local: how many clients' local trainings run as one program, which changes results by ..."""
    ray_address: str | None
    """With `engine` ray: a running cluster to join, such as auto or HOST:6379."""
    gpus_per_worker: float
    """With `engine` ray: share of a GPU for each worker."""
    min_replies: int
    """Good replies that a call to a whole cohort needs."""
    reply_timeout: float | None
    """Seconds that a client has for a reply."""
