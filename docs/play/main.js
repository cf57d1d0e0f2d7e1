// Load both networks, then hand each to its part of the page: from then on it works offline.

const status = document.getElementById("status");
try {
  const { FewShotClassifier, GatedReader } = await import("./networks.js");
  const [{ showSigns }, { showLine }, classifier, reader] = await Promise.all([
    import("./signs.js"),
    import("./line.js"),
    FewShotClassifier.load(),
    GatedReader.load(),
  ]);
  document.querySelector("main").hidden = false;
  showSigns(classifier);
  showLine(reader);
  status.textContent = "The networks are loaded: the page needs the net no more.";
} catch (error) {
  status.textContent = "The networks could not be loaded. This copy of the page may lack them: run make page, then serve its folder.";
  throw error;
}
