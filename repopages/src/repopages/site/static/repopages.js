// Sphinx's search links to pages by their names as they are: encode what would end an address, such as "#" and "?".
if (typeof Search !== "undefined") {
  const encode = (index) => {
    index.docnames = index.docnames.map((name) => name.split("/").map(encodeURIComponent).join("/"));
  };
  if (Search.hasIndex()) encode(Search._index);
  else {
    const setIndex = Search.setIndex;
    Search.setIndex = (index) => { encode(index); setIndex(index); };
  }
}
